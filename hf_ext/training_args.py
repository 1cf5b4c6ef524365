"""TrainingArguments with what hf_ext adds. With no preset and no flag they mean what stock Trainer means."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from accelerate.utils import DynamoBackend
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy
from transformers.utils import is_torch_bf16_gpu_available

from .argument_checks import (
    ABOVE_ZERO,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    NUM_WORKERS,
    SEED,
    SHARE_BELOW_ONE,
    Range,
    check_choices,
    check_ranges,
    check_types,
    field_types,
    members,
    read_hub_strategy,
)
from .disk import find_at_home
from .errors import ArgumentError
from .presets import PRESETS, preset_values
from .processes import check_together, need_cpu_backend, need_gloo
from .speedups import REGISTRY
from .units import less_is_better

CACHE_DIR = "~/.cache/hf_ext/embeddings"
OPTIMIZER_EXTENSIONS = ("muon", "cpu_offload")
NO = ("false", "no", "off", "0", "n", "f", "none")  # that a condition takes for True

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("effective_batch_size", "cached_batch_size", "max_tokens_per_batch", "eval_every_epochs"),
            *("early_stopping_patience", "torch_profiler", "baseline_batch_size"),
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            *("save_minutes", "max_hours", "save_total_size_gb", "eval_subset", "max_encoder_noise", "ddp_timeout"),
            *("activation_budget_gb", "baseline_batches_per_second", "encoder_learning_rate"),
        ),
        ABOVE_ZERO,
    ),
    **dict.fromkeys(
        (
            *("early_stopping_min_delta", "dollars_per_hour", "learning_rate", "weight_decay", "adam_epsilon"),
            *("warmup_steps", "neftune_noise_alpha"),
            *("logging_steps", "eval_steps"),  # save_steps -1: stock Trainer saves by no steps
        ),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), SHARE_BELOW_ONE),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    "max_grad_norm": Range("a number; 0 and less clip nothing", lambda value: not math.isnan(value)),
    "label_smoothing_factor": Range("from 0 to 1", lambda value: 0 <= value <= 1),
    "dataloader_num_workers": NUM_WORKERS,
    "num_train_epochs": FINITE,
}

logger = logging.getLogger(__name__)


def option(default: Any, help: str) -> Any:
    """A field of a dataclass with what `--help` says of it."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(repr=False)  # the parent's hides tokens
class FastTrainingArguments(TrainingArguments):
    """As `transformers.TrainingArguments`, plus the speed-ups and what they need.

    Constructs on CPU, T4 and A100 alike: whether a request fits the machine is the plan's decision, not this class's.
    `preset` sets what no keyword gives, as on the command line.

    Raises:
        ArgumentError: a value of another type than the field's, a word or number that is not allowed, or arguments that
            contradict each other.
    """

    preset: str | None = option(None, f"{', '.join(PRESETS)}; several joined by '+', or none. Recorded in the plan.")
    speedups: list[str] = option(
        [], "Speed-ups to use where they fit: names, or 'all' (those that leave learning as it is)."
    )
    without: list[str] = option([], "Speed-ups to leave out of --speedups all.")
    effective_batch_size: int | None = option(
        None, "Rows per optimizer step over all processes; sets accumulation. Class L."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = option(
        "none", "How the learning rate follows the effective batch size. Class L."
    )
    cached_batch_size: int | None = option(
        None, "Largest batch for heads on cached embeddings, unless --per_device_train_batch_size is set."
    )
    max_tokens_per_batch: int | None = option(
        None, "Tokens per device and pass, special ones included; rows vary to fill it. Class L."
    )
    embedding_cache_dir: str = option(CACHE_DIR, "Where embeddings of frozen encoders are kept.")
    max_encoder_noise: float = option(
        0.05, "Half-precision encoders are used if their rounding stays below this share of the spread."
    )
    torch_profiler: int | None = option(
        None,
        "Optimizer steps to run under torch.profiler after warm-up, once: writes profile_trace.json.gz, and the ten "
        "most costly operations into record and report. No rate includes them.",
    )
    baseline_json: str | None = option(
        None, "comparison.json of recipes/compare.py: logs the speed against its baseline."
    )
    baseline_batches_per_second: float | None = option(
        None,
        "In place of --baseline_json: batches of --baseline_batch_size rows per second that something else trains on "
        "this machine. Speeds are compared by rows.",
    )
    baseline_batch_size: int | None = option(None, "Rows in a batch of --baseline_batches_per_second.")
    resume: str = option(
        "no",
        "'auto' continues from the newest checkpoint in output_dir that verifies, 'no' starts anew, anything else is "
        "the folder of a checkpoint.",
    )
    allow_changed: list[str] = option(
        [], "What may differ from the checkpoint's run: argument names, 'data', 'model', or 'all'."
    )
    save_minutes: float | None = option(None, "Also save when this many minutes have passed since the last checkpoint.")
    max_hours: float | None = option(None, "Save and stop before the process is this old (Colab's limit).")
    keep_epoch_checkpoint: bool = option(False, "Also keep the newest checkpoint that ends an epoch.")
    save_total_size_gb: float | None = option(
        None, "Most that the output folder may hold at any moment, in GB (10^9 bytes)."
    )
    disk_policy: Literal["refuse", "degrade"] = option(
        "refuse", "What to do where save_total_size_gb is too small: stop, or store less."
    )
    local_checkpoint_dir: str | None = option(
        None, "Fast folder to save to first; copied to output_dir (a mounted Drive) in the background."
    )
    nan_policy: Literal["stop", "skip"] = option(
        "stop", "A step whose loss or gradient is NaN or infinite: end the run, or go on without that step."
    )
    find_batch_size: bool = option(
        False,
        "Try the longest rows before training and take the most at a time that fit; accumulation keeps the rows of an "
        "optimizer step as they are.",
    )
    oom_policy: Literal["stop", "step_down"] = option(
        "stop",
        "Where memory does not suffice: end the run, or make the step again with fewer rows at a time. Learning stays "
        "as it is.",
    )
    eval_subset: float | None = option(
        None,
        "Rows of each evaluation during training: a count above 1, or a share up to 1.0 (0.05). The same rows every "
        "time, stratified by label and --group_column. A new best is confirmed on all rows.",
    )
    eval_every_epochs: int | None = option(
        None, "With --eval_strategy epoch: evaluate after every so many epochs only."
    )
    early_stopping_patience: int | None = option(
        None,
        "Stop after this many evaluations in a row whose interval excludes an improvement of "
        "--early_stopping_min_delta; never in warm-up.",
    )
    early_stopping_min_delta: float = option(
        0.01, "Smallest improvement worth training for, in the unit of the metric."
    )
    hub_strategy: Literal["end", "best", "every_save", "checkpoint", "all_checkpoints"] = option(
        "every_save",
        "With --push_to_hub, beside the trained model at the end: nothing, the model of each new best checkpoint, of "
        "each checkpoint with what continues the newest as last-checkpoint/, or of each checkpoint.",
    )
    dollars_per_hour: float | None = option(None, "Price of the machine per hour, for the money in the report.")
    attention: Literal["auto", "faesm", "varlen", "blocked", "padded", "flex", "flash_attention_2", "sdpa", "eager"] = (
        option("auto", "Attention of ESM, BERT and T5 encoders; auto takes what the hardware is fastest with.")
    )
    compile_mode: Literal["default", "reduce-overhead"] = option(
        "default",
        "Of compiled blocks: reduce-overhead replays CUDA graphs, where every batch has one shape. "
        "(--torch_compile_mode compiles the whole model.)",
    )
    activation_policy: Literal["none", "pointwise", "half", "attention", "full", "auto"] | None = option(
        None,
        "What layers compute again in the backward pass to keep less: norms and GELU; every second layer; all but "
        "attention; everything; or the least that fits --activation_budget_gb.",
    )
    activation_budget_gb: float | None = option(
        None, "With --activation_policy auto: GB (10^9 bytes) that encoder layers may keep of a batch."
    )
    block_pattern: str | None = option(
        None,
        "Which modules are the repeated layers, where the model's structure does not show it: a regular expression of "
        "their whole names (trunk\\.layers\\.\\d+). For compilation, recomputing, FSDP2 and Muon.",
    )
    encoder_learning_rate: float | None = option(
        None, "Learning rate of encoders that train; --learning_rate is then the head's."
    )
    optim_ext: list[str] | None = option(
        None,
        "muon: torch's Muon for matrices of repeated layers, AdamW for the rest; sweep the rate. Class L. cpu_offload: "
        "the optimizer's states and steps in host memory. Both may be given.",
    )
    nccl_preset: Literal["pcie", "nvlink", "infiniband", "sockets"] | None = option(
        None, "Few NCCL variables for what connects the GPUs, set where you set none; see hf_ext/nccl.py."
    )
    use_peft: bool = option(False, "LoRA: adapters train beside frozen encoder weights. Class L.")
    lora_r: int = option(8, "LoRA rank.")
    lora_alpha: int = option(16, "LoRA scale: updates are multiplied by alpha / r.")
    lora_dropout: float = option(0.0, "Dropout before LoRA's first matrix; above 0 it keeps a copy of every input.")
    lora_target_modules: list[str] | None = option(
        None, "Linear layers to adapt, by the end of their names; None: all of the family's."
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) (rsLoRA).")
    use_dora: bool = option(False, "Weight-decomposed LoRA (DoRA).")
    load_in_8bit: bool = option(
        False, "Frozen linear layers of encoders, under LoRA or cached, in 8 bits a weight (bitsandbytes)."
    )
    load_in_4bit: bool = option(False, "As --load_in_8bit, in 4 bits (nf4).")

    def __new__(cls, *args: Any, **kwargs: Any) -> FastTrainingArguments:
        """Remembers which fields are given, also with their default: a preset leaves them alone."""
        made = super().__new__(cls)
        vars(made)["_keywords"] = {*kwargs, *(spec.name for spec in dataclasses.fields(cls)[: len(args)])}
        return made

    def __post_init__(self) -> None:
        given = vars(self).pop("_keywords", ())
        if {spec.name for spec in dataclasses.fields(self) if spec.init} <= {*given}:  # as HfArgumentParser gives them
            given = changed_fields(self)
        preset = {name: value for name, value in preset_values(self.preset).items() if name not in given}
        vars(self).update(preset)
        _read_types(self)
        self._marked: frozenset[str] | None = None
        self._given = changed_fields(self) - preset.keys()
        if self.metric_for_best_model and self.greater_is_better is None:
            # The parent takes everything but a loss for a score, and would keep the model with the largest RMSE.
            self.greater_is_better = not less_is_better(self.metric_for_best_model)
        moved = not self.use_cpu and need_cpu_backend()
        self.use_cpu = self.use_cpu or moved
        if not self.use_cpu and self.ddp_backend is None and need_gloo():
            self.ddp_backend = "gloo"
        for half, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
            if getattr(self, half) and getattr(self, other):  # the parent would say first that this machine has no bf16
                raise ArgumentError(f"{half}=True with {other}=True: a run computes in one precision. Leave one out.")
        # The parent refuses these two by the machine it stands on, or switches TF32 on for good: the plan decides.
        tf32, bf16 = self.tf32, self.bf16
        self.tf32 = False if tf32 is False else None
        self.bf16 = bool(bf16 and (self.use_cpu or is_torch_bf16_gpu_available()))
        strategy = read_hub_strategy(self)
        self.hub_strategy = "end"  # the parent does not know "best"
        super().__post_init__()
        check_together(self.world_size)
        if moved and self.process_index == 0:
            logger.warning("No accelerator here: the %d processes train together on the CPU (gloo).", self.world_size)
        self.tf32, self.bf16 = tf32, bf16
        self.hub_strategy = strategy if strategy == "best" else HubStrategy(strategy)  # type: ignore[assignment]
        if self.bf16:
            self.mixed_precision = "bf16"
        self._built = _values(self)
        _check_values(self)

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Fields that the user set: as the parser recorded, or, in code, those given other values than the default."""
        if self._marked is not None:
            return self._marked
        return self._given | {name for name, value in self._built.items() if getattr(self, name) != value}

    def mark_explicit(self, names: frozenset[str]) -> None:
        """Records which fields came from the command line or YAML; others may be set by the plan."""
        self._marked = frozenset(names)

    def __copy__(self) -> FastTrainingArguments:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTrainingArguments:
        """With the tokens, which leave the process by pickle alone."""
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle stores: everything but tokens."""
        return {name: None if name.endswith("_token") else value for name, value in self.__dict__.items()}


STOCK_FIELDS = frozenset(spec.name for spec in dataclasses.fields(TrainingArguments))
OWN_FIELDS = {spec.name: spec for spec in dataclasses.fields(FastTrainingArguments) if spec.name not in STOCK_FIELDS}


def default_of(spec: dataclasses.Field) -> Any:
    """The value that a field has where nobody gives one."""
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default


def changed_fields(args: TrainingArguments) -> frozenset[str]:
    """Names of the fields that do not have their default."""
    return frozenset(spec.name for spec in dataclasses.fields(args) if getattr(args, spec.name) != default_of(spec))


def asks_for_more(args: Any) -> bool:
    """Whether an argument that `TrainingArguments` does not have has another value than its default."""
    return any(getattr(args, name) != default_of(spec) for name, spec in OWN_FIELDS.items())


def check_plain(args: TrainingArguments) -> None:
    """Refuses plain `TrainingArguments` that no run could use.

    Raises:
        ArgumentError: as `FastTrainingArguments`.
    """
    check_together(args.world_size)
    _read_types(args)
    if args.push_to_hub:
        read_hub_strategy(args)
    _check_values(args)


def _values(args: Any) -> dict[str, Any]:
    return {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(args) if spec.name != "hub_token"}


def _read_types(args: Any) -> None:
    """Makes `speedups="all"` a list of one, as Trainer does with `report_to`, and refuses values of other types.

    Of Trainer's own fields, whose code takes more than they say, only what must be a mistake: a part of a step or seed,
    and words for no.
    """
    for name, hint in field_types(args.__class__).items():
        value, kinds = getattr(args, name), set(members(hint)) - {type(None)}
        if name in OWN_FIELDS:
            if isinstance(value, str) and list[str] in kinds:
                setattr(args, name, [value])
        elif value is None and type(None) in members(hint):
            continue
        elif kinds == {int} and not (isinstance(value, Real) and float(value).is_integer()):
            raise ArgumentError(f"{name}={value!r}: must be a whole number.")
        elif kinds == {bool} and isinstance(value, str) and value.lower() in NO:
            raise ArgumentError(f"{name}={value!r}: must be True or False: Python takes any text for True.")
    check_types(args, OWN_FIELDS)
    if str(args.resume) not in ("auto", "no") and str(args.resume).lower() in ("", "auto", "true", "yes", *NO):
        raise ArgumentError(
            f"resume={args.resume!r}: allowed are 'auto' (the newest checkpoint in output_dir), 'no', and the folder "
            "of a checkpoint (./NAME, where it has such a name)."
        )


def _check_values(args: Any) -> None:
    """Words, numbers and texts that Trainer would take apart only after the data was read and the model built."""
    check_choices(args)
    check_ranges(args, RANGES)
    for name in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        value = getattr(args, name)
        if value is not None and not isinstance(value, Mapping):
            raise ArgumentError(f'{name}={value!r}: must be a mapping, such as {{"name": 1}}.')
    for part in args.optim_args.replace(" ", "").split(",") if args.optim_args else ():
        if part.count("=") != 1:
            raise ArgumentError(f"optim_args={args.optim_args!r}: write name=value, with commas between several.")
    speedups, backend = ["all", *(speedup.NAME for speedup in REGISTRY)], args.torch_compile_backend
    for name, words, allowed in (
        ("speedups", args.speedups, speedups),
        ("without", args.without, speedups),
        ("optim_ext", args.optim_ext, OPTIMIZER_EXTENSIONS),
        ("report_to", args.report_to, [*INTEGRATION_TO_CALLBACK, "all", "none"]),
        ("torch_compile_backend", [backend.lower()] if backend else [], [one.value.lower() for one in DynamoBackend]),
    ):
        for word in words or ():
            if isinstance(word, str) and word not in allowed:
                raise ArgumentError(f"{name}={word!r}: allowed are {', '.join(allowed)}.")
    if args.block_pattern is not None:
        try:
            re.compile(args.block_pattern)
        except re.error as error:
            raise ArgumentError(f"block_pattern={args.block_pattern!r}: no regular expression ({error}).") from None
    budget = args.activation_budget_gb
    if (args.activation_policy == "auto") != (budget is not None):
        raise ArgumentError(
            f"activation_policy={args.activation_policy!r}, activation_budget_gb={budget!r}: auto needs a budget, "
            "and a budget needs auto."
        )
    batches, rows = args.baseline_batches_per_second, args.baseline_batch_size
    if (batches is None) != (rows is None):
        raise ArgumentError(
            f"baseline_batches_per_second={batches!r}, baseline_batch_size={rows!r}: give both, since speeds are "
            "compared by rows."
        )
    if batches is not None and args.baseline_json is not None:
        raise ArgumentError("baseline_json and baseline_batches_per_second are two baselines: leave one of them out.")
    if not args.embedding_cache_dir:
        raise ArgumentError(f"embedding_cache_dir={args.embedding_cache_dir!r}: name a folder.")
    if args.embedding_cache_dir == CACHE_DIR and not find_at_home(CACHE_DIR):
        args.embedding_cache_dir = f"{os.path.normpath(str(args.output_dir))}-embeddings"
        logger.warning(
            "%s cannot be written to: embeddings are kept in %s, or where --embedding_cache_dir says.",
            *(CACHE_DIR, args.embedding_cache_dir),
        )
