"""TrainingArguments with what hf_ext adds. With no preset and no flag they mean what stock Trainer means."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy
from transformers.utils import is_torch_bf16_gpu_available

from .argument_checks import check_training_values, read_hub_strategy
from .argument_names import ShortName, short_name
from .argument_types import check_resume, check_types, wrap_single_words
from .disk import find_at_home
from .errors import ArgumentError
from .presets import PRESETS, TakesPresets
from .processes import check_together, need_cpu_backend, need_gloo
from .speedups import REGISTRY
from .units import less_is_better

CACHE_DIR = "~/.cache/hf_ext/embeddings"

logger = logging.getLogger(__name__)


@dataclass(repr=False)  # the parent's hides tokens
class FastTrainingArguments(TrainingArguments, metaclass=TakesPresets):
    """As `transformers.TrainingArguments`, plus the speed-ups and what they need.

    Constructs on CPU, T4 and A100 alike: whether a request fits the machine is the plan's decision, not this class's.
    Of fields that end in `_ext` the name without is a keyword and attribute too: see `argument_names.py`. `preset` sets
    what else is not given, as on the command line.
    """

    preset: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": f"{', '.join(PRESETS)}; several joined by '+', or none. Recorded in the plan."}
    )
    speedups: list[str] = field(
        default_factory=list,
        metadata={"help": "Speed-ups to use where they fit: names, or 'all' (those that leave learning as it is)."},
    )
    without: list[str] = field(default_factory=list, metadata={"help": "Speed-ups to leave out of --speedups all."})
    effective_batch_size: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "Rows per optimizer step over all processes; sets accumulation. Class L."}
    )
    max_tokens_per_step: None | int = field(  # noqa: RUF036
        default=None,
        metadata={"help": "With max_tokens_per_batch: tokens per optimizer step over all processes, at most. Class L."},
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = field(
        default="none", metadata={"help": "How the learning rate follows the effective batch size. Class L."}
    )
    cached_batch_size: None | int = field(  # noqa: RUF036
        default=None,
        metadata={"help": "Largest batch for heads on cached embeddings, unless --per_device_train_batch_size is set."},
    )
    max_tokens_per_batch: None | int = field(  # noqa: RUF036
        default=None,
        metadata={"help": "Tokens per device and pass, special ones included; rows vary to fill it. Class L."},
    )
    embedding_cache_dir: str = field(
        default=CACHE_DIR, metadata={"help": "Where embeddings of frozen encoders are kept."}
    )
    embedding_tokens_per_batch: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "Residues per encoding batch; halves itself when memory runs out."}
    )
    max_encoder_noise: float = field(
        default=0.05,
        metadata={"help": "Half-precision encoders are used if their rounding stays below this share of the spread."},
    )
    throughput_warmup_steps: int = field(
        default=3, metadata={"help": "First steps (compilation, warm-up) that no reported rate includes."}
    )
    torch_profiler: None | int = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Optimizer steps to run under torch.profiler after warm-up, once: writes profile_trace.json.gz, "
            "and the ten most costly operations into record and report. No rate includes them."
        },
    )
    baseline_json: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "comparison.json of recipes/compare.py: logs the speed against its baseline."}
    )
    baseline_batches_per_second: None | float = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "In place of --baseline_json: batches of --baseline_batch_size rows per second that something else "
            "trains on this machine. Speeds are compared by rows."
        },
    )
    baseline_batch_size: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "Rows in a batch of --baseline_batches_per_second."}
    )
    resume: str = field(
        default="no",
        metadata={
            "help": "'auto' continues from the newest checkpoint in output_dir that verifies, 'no' starts anew, "
            "anything else is the folder of a checkpoint."
        },
    )
    allow_changed: list[str] = field(
        default_factory=list,
        metadata={"help": "What may differ from the checkpoint's run: argument names, 'data', 'model', or 'all'."},
    )
    save_minutes: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Also save when this many minutes have passed since the last checkpoint."}
    )
    max_hours: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Save and stop before the process is this old (Colab's limit)."}
    )
    stop_margin_minutes: float = field(
        default=5.0, metadata={"help": "How long before max_hours the last checkpoint is begun."}
    )
    keep_epoch_checkpoint: bool = field(
        default=False, metadata={"help": "Also keep the newest checkpoint that ends an epoch."}
    )
    save_total_size_gb: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Most that the output folder may hold at any moment, in GB (10^9 bytes)."}
    )
    disk_policy: Literal["refuse", "degrade"] = field(
        default="refuse", metadata={"help": "What to do where save_total_size_gb is too small: stop, or store less."}
    )
    save_failures_allowed: int = field(
        default=3, metadata={"help": "Checkpoints in a row that may fail to be written before the run stops."}
    )
    nan_policy: Literal["stop", "skip"] = field(
        default="stop",
        metadata={"help": "A step whose loss or gradient is NaN or infinite: end the run, or go on without that step."},
    )
    find_batch_size: bool = field(
        default=False,
        metadata={
            "help": "Try the longest rows before training and take the most at a time that fit; accumulation keeps the "
            "rows of an optimizer step as they are."
        },
    )
    oom_policy: Literal["stop", "step_down"] = field(
        default="stop",
        metadata={
            "help": "Where memory does not suffice: end the run, or make the step again with fewer rows at a time, "
            "then with activations recomputed. Learning stays as it is."
        },
    )
    max_eval_samples_ext: None | float = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Rows of each evaluation during training: a count above 1, or a share up to 1.0 (0.05). The same "
            "rows every time, stratified by label and --eval_group_column. A new best is confirmed on all rows."
        },
    )
    eval_every_epochs: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "With --eval_strategy epoch: evaluate after every so many epochs only."}
    )
    eval_minutes: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Also evaluate when this many minutes have passed since the last evaluation."}
    )
    eval_full_every: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "With --max_eval_samples: every so many evaluations one looks at all rows."}
    )
    eval_group_column: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "Column whose groups --max_eval_samples keeps in proportion."}
    )
    early_stopping_patience: None | int = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Stop after this many evaluations in a row whose interval excludes an improvement of "
            "--early_stopping_min_delta; never in warm-up."
        },
    )
    early_stopping_min_delta: float = field(
        default=0.01, metadata={"help": "Smallest improvement worth training for, in the unit of the metric."}
    )
    hub_strategy: Literal["end", "best", "checkpoint", "every_save"] = field(
        default="every_save",
        metadata={
            "help": "With --push_to_hub, beside the trained model at the end: nothing, the model of each new best "
            "checkpoint, of each checkpoint with what continues the newest as last-checkpoint/, or of each checkpoint."
        },
    )
    dollars_per_hour: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Price of the machine per hour, for the money in the report."}
    )
    local_checkpoint_dir: None | str = field(  # noqa: RUF036
        default=None,
        metadata={"help": "Fast folder to save to first; copied to output_dir (a mounted Drive) in the background."},
    )
    attention: Literal["auto", "faesm", "varlen", "blocked", "padded", "flex", "flash_attention_2", "sdpa", "eager"] = (
        field(
            default="auto",
            metadata={"help": "Attention of ESM, BERT and T5 encoders; auto takes what the hardware is fastest with."},
        )
    )
    compile_mode: Literal["default", "reduce-overhead", "auto"] = field(
        default="default",
        metadata={
            "help": "Of compiled blocks: reduce-overhead replays CUDA graphs, where every batch has one shape; auto "
            "takes it there. (--torch_compile_mode compiles the whole model.)"
        },
    )
    activation_policy: Literal["none", "pointwise", "half", "attention", "full", "auto"] | None = field(
        default=None,
        metadata={
            "help": "What layers compute again in the backward pass to keep less: norms and GELU; every second layer; "
            "all but attention; everything; or the least that fits --activation_budget_gb."
        },
    )
    activation_budget_gb: None | float = field(  # noqa: RUF036
        default=None,
        metadata={"help": "With --activation_policy auto: GB (10^9 bytes) that encoder layers may keep of a batch."},
    )
    block_pattern: None | str = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Which modules are the repeated layers, where the model's structure does not show it: a regular "
            "expression of their whole names (trunk\\.layers\\.\\d+). For compilation, recomputing, FSDP2 and Muon."
        },
    )
    encoder_learning_rate: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Learning rate of encoders that train; --learning_rate is then the head's."}
    )
    optim_ext: list[str] | None = field(
        default=None,
        metadata={
            "help": "muon: torch's Muon for matrices of repeated layers, AdamW for the rest; sweep the rate. Class L. "
            "cpu_offload: the optimizer's states and steps in host memory. Both may be given."
        },
    )
    nccl_preset: Literal["pcie", "nvlink", "infiniband", "sockets"] | None = field(
        default=None,
        metadata={"help": "Few NCCL variables for what connects the GPUs, set where you set none; see hf_ext/nccl.py."},
    )
    use_peft_ext: bool = field(
        default=False, metadata={"help": "LoRA: adapters train beside frozen encoder weights. Class L."}
    )
    lora_r_ext: int = field(default=8, metadata={"help": "LoRA rank."})
    lora_alpha_ext: int = field(default=16, metadata={"help": "LoRA scale: updates are multiplied by alpha / r."})
    lora_dropout_ext: float = field(
        default=0.0, metadata={"help": "Dropout before LoRA's first matrix; above 0 it keeps a copy of every input."}
    )
    lora_target_modules_ext: list[str] | None = field(
        default=None, metadata={"help": "Linear layers to adapt, by the end of their names; None: all of the family's."}
    )
    use_rslora_ext: bool = field(default=False, metadata={"help": "Scale by alpha / sqrt(r) (rsLoRA)."})
    use_dora_ext: bool = field(default=False, metadata={"help": "Weight-decomposed LoRA (DoRA)."})
    load_in_8bit_ext: bool = field(
        default=False,
        metadata={"help": "Frozen linear layers of encoders, under LoRA or cached, in 8 bits a weight (bitsandbytes)."},
    )
    load_in_4bit_ext: bool = field(default=False, metadata={"help": "As --load_in_8bit, in 4 bits (nf4)."})

    max_eval_samples, use_peft = ShortName(), ShortName()
    lora_r, lora_alpha, lora_dropout, lora_target_modules = ShortName(), ShortName(), ShortName(), ShortName()
    use_rslora, use_dora = ShortName(), ShortName()
    load_in_8bit, load_in_4bit = ShortName(), ShortName()

    def __post_init__(self) -> None:
        self._check_types()
        self._explicit: frozenset[str] | None = None
        self._given = self._changed()
        if self.metric_for_best_model and self.greater_is_better is None:
            # The parent takes everything but a loss for a score, and would keep the model with the largest RMSE.
            self.greater_is_better = not less_is_better(self.metric_for_best_model)
        moved = not self.use_cpu and need_cpu_backend()
        self.use_cpu = self.use_cpu or moved
        if not self.use_cpu and self.ddp_backend is None and need_gloo():
            self.ddp_backend = "gloo"
        self._check_one_precision()
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
        self._built = {short_name(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        self._check_values()

    def adopt_values(self) -> None:
        """Completes arguments whose values came from plain `TrainingArguments`: our fields get their defaults."""
        for spec in dataclasses.fields(FastTrainingArguments):
            if spec.name not in self.__dict__:
                setattr(self, spec.name, _default(spec))
        self._check_types()
        if self.push_to_hub:
            read_hub_strategy(self)
        self._explicit = None
        self._given = self._changed()
        self._built = {short_name(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        self._check_values()

    def _changed(self) -> frozenset[str]:
        """Names of the fields that do not have their default."""
        return frozenset(short_name(f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != _default(f))

    def _check_types(self) -> None:
        wrap_single_words(self, FastTrainingArguments, TrainingArguments)
        check_types(self, FastTrainingArguments, TrainingArguments)
        check_resume(self.resume)

    def _check_one_precision(self) -> None:
        """Before the parent, which would say first that this machine has no bf16."""
        for bf16, fp16 in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
            if getattr(self, bf16) and getattr(self, fp16):
                raise ArgumentError(f"{bf16}=True with {fp16}=True: a run computes in one precision. Leave one out.")

    def _check_values(self) -> None:
        known = [speedup.NAME for speedup in REGISTRY]
        unknown = [name for name in [*self.speedups, *self.without] if name not in [*known, "all"]]
        if unknown:
            raise ArgumentError(f"Unknown speed-up(s) {unknown}. Known: all, {', '.join(known)}.")
        check_training_values(self, [*INTEGRATION_TO_CALLBACK, "all", "none"])
        if not self.embedding_cache_dir:
            raise ArgumentError(f"embedding_cache_dir={self.embedding_cache_dir!r}: name a folder.")
        if self.embedding_cache_dir == CACHE_DIR and not find_at_home(CACHE_DIR):
            self.embedding_cache_dir = f"{os.path.normpath(str(self.output_dir))}-embeddings"
            logger.warning(
                "%s cannot be written to: embeddings are kept in %s, or where --embedding_cache_dir says.",
                *(CACHE_DIR, self.embedding_cache_dir),
            )

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Fields that the user set: as the parser recorded, or, in code, those given other values than the default."""
        if self._explicit is not None:
            return self._explicit
        return self._given | {name for name, value in self._built.items() if getattr(self, name) != value}

    @property
    def asks_for_more(self) -> bool:
        """Whether an argument that `TrainingArguments` does not have has another value than its default."""
        stock = {f.name for f in dataclasses.fields(TrainingArguments)}
        own = [f for f in dataclasses.fields(FastTrainingArguments) if f.name not in stock]
        return any(getattr(self, f.name) != _default(f) for f in own)

    def mark_explicit(self, names: frozenset[str]) -> None:
        """Records which fields came from the command line or YAML; others may be set by the plan."""
        self._explicit = frozenset(map(short_name, names))

    def leave_to_plan(self, names: frozenset[str]) -> None:
        """Records which values are a preset's and not the user's."""
        self._given -= names

    def to_dict(self) -> dict[str, Any]:
        """As in the parent class, under the short names."""
        return {short_name(name): value for name, value in super().to_dict().items()}

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
        """What `torch.save` stores, where Trainer pickles its arguments while pushing: everything but tokens."""
        return {**_without_tokens(self.__dict__), "_built": _without_tokens(self._built)}


def _without_tokens(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name.endswith("_token") else value for name, value in values.items()}


def _default(spec: dataclasses.Field) -> object:
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
