"""TrainingArguments with what hf_ext adds. With no preset and no flag they mean what stock Trainer means."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from .arguments import (
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    NUM_WORKERS,
    SEED,
    EvaluatingArguments,
    LoraArguments,
    Range,
    SavingArguments,
    SpeedArguments,
    StepArguments,
    check_choices,
    check_ranges,
    check_types,
    field_types,
    members,
    preset_values,
    ranges_in_types,
)
from .errors import ArgumentError
from .optional import require
from .processes import check_together, need_cpu_backend, need_gloo
from .text import less_is_better

if TYPE_CHECKING:
    from transformers.trainer_pt_utils import AcceleratorConfig
    from transformers.trainer_utils import HubStrategy

RECOMPUTED = ("attention", "feed_forward", "layers")  # of `activation_checkpointing`
NO_FOLDER = ("", "auto", "true", "yes", "false", "no", "off", "none")  # what people write for `resume`

# Of the fields of transformers; ours have theirs in their types.
STOCK_RANGES: dict[str, Range] = {
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "max_grad_norm": Range("a number; 0 and less clip nothing", lambda value: not math.isnan(value)),
    "num_train_epochs": FINITE,
    "logging_steps": NOT_NEGATIVE,
    "eval_steps": NOT_NEGATIVE,  # save_steps -1: stock Trainer saves by no steps
    "seed": SEED,
    "data_seed": SEED,
    "dataloader_num_workers": NUM_WORKERS,
}

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class FastTrainingArguments(
    EvaluatingArguments,
    SavingArguments,
    StepArguments,
    LoraArguments,
    SpeedArguments,
    TrainingArguments,
):
    """As `transformers.TrainingArguments`, plus the speed-ups and what they need.

    Constructs on CPU, T4 and A100 alike: whether a request fits the machine is the plan's decision, not this class's.
    `preset` sets what no keyword gives, as on the command line.

    Raises:
        ArgumentError: a value of another type than the field's, a word or number that is not allowed, or arguments that
            contradict each other.
        MissingDependencyError: DeepSpeed is asked for, here or by the launcher, and is not installed.
    """

    if TYPE_CHECKING:  # what the parent makes of them
        output_dir: str = ""
        activation_checkpointing: Any = None
        accelerator_config: AcceleratorConfig = AcceleratorConfig()  # type: ignore[assignment]
        hub_strategy: HubStrategy = HubStrategy.EVERY_SAVE

    _VALID_DICT_FIELDS = [  # read from JSON
        *TrainingArguments._VALID_DICT_FIELDS,
        "lora_kwargs",
    ]

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
        if self.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):  # the parent says so in a traceback
            require("deepspeed", "deepspeed", "--deepspeed or a launcher's zero3.yaml")
        moved = not self.use_cpu and need_cpu_backend()
        self.use_cpu = self.use_cpu or moved
        if not self.use_cpu and self.ddp_backend is None and need_gloo():
            self.ddp_backend = "gloo"
        for half, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
            if getattr(self, half) and getattr(self, other):  # the parent would say first that this machine has no bf16
                raise ArgumentError(f"{half}=True with {other}=True: a run computes in one precision. Leave one out.")
        # The parent refuses these two by the machine it stands on, or switches TF32 on for good: the plan decides.
        tf32 = self.tf32
        bf16 = self.bf16
        self.tf32 = False if tf32 is False else None
        self.bf16 = bool(bf16 and (self.use_cpu or is_torch_bf16_gpu_available()))
        saves_best_apart = self.load_best_model_at_end and evaluates_apart(self)
        if saves_best_apart:  # Trainer would refuse that: where it is evaluated, nothing would be saved
            self.load_best_model_at_end = False
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        super().__post_init__()
        self.load_best_model_at_end |= saves_best_apart
        check_together(self.world_size)
        if moved and self.process_index == 0:
            logger.warning("No accelerator here: the %d processes train together on the CPU (gloo).", self.world_size)
        self.tf32 = tf32
        self.bf16 = bf16
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
RANGES = STOCK_RANGES | ranges_in_types(FastTrainingArguments)
OWN_FIELDS = {spec.name: spec for spec in dataclasses.fields(FastTrainingArguments) if spec.name not in STOCK_FIELDS}


def evaluates_apart(args: TrainingArguments) -> bool:
    """Returns whether a run is evaluated by epochs and saved by steps, or the reverse: new best models are then
    saved."""
    return (args.eval_strategy, args.save_strategy) in (("epoch", "steps"), ("steps", "epoch"))


def default_of(spec: dataclasses.Field) -> Any:
    """Returns the value that a field has where none is given."""
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default


def changed_fields(args: TrainingArguments) -> frozenset[str]:
    """Names of the fields that do not have their default."""
    return frozenset(spec.name for spec in dataclasses.fields(args) if getattr(args, spec.name) != default_of(spec))


def asks_for_more(args: TrainingArguments) -> bool:
    """Returns whether an argument that `TrainingArguments` does not have has another value than its default."""
    return any(getattr(args, name) != default_of(spec) for name, spec in OWN_FIELDS.items())


def _values(args: TrainingArguments) -> dict[str, Any]:
    return {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(args) if spec.name != "hub_token"}


def _read_types(args: Any) -> None:
    """Makes `speedups="all"` a list of one, as Trainer does with `report_to`, and refuses values of other types.

    Of our own fields: what Trainer's take is Trainer's to say.
    """
    for name, hint in field_types(args.__class__).items():
        if name in OWN_FIELDS and isinstance(getattr(args, name), str) and list[str] in members(hint):
            setattr(args, name, [getattr(args, name)])
    check_types(args, OWN_FIELDS)
    check_choices(args)
    asked = args.activation_checkpointing
    if isinstance(asked, str):
        asked = yaml.safe_load(asked.lower())
    if asked not in (None, False, *RECOMPUTED) and not (isinstance(asked, int) and asked > 0):
        allowed = f"true, false, {', '.join(RECOMPUTED)}, and a number n, for every n-th layer"
        raise ArgumentError(f"activation_checkpointing={args.activation_checkpointing!r}: allowed are {allowed}.")
    args.activation_checkpointing = False if asked == 0 else asked  # None: by the older name
    if str(args.resume) not in ("auto", "no") and str(args.resume).lower() in NO_FOLDER:
        raise ArgumentError(
            f"resume={args.resume!r}: allowed are 'auto' (the newest checkpoint in output_dir), 'no', and the folder "
            "of a checkpoint (./NAME, where it has such a name)."
        )


def _check_values(args: FastTrainingArguments) -> None:
    """Checks words, numbers and texts that Trainer would read only after data and model are ready."""
    from .reporting import read_baseline
    from .speedups import REGISTRY  # all models of transformers that they change: `--help` does without

    check_ranges(args, RANGES)
    if (args.lr_scaling is None) != (args.lr_base_batch_size is None):
        raise ArgumentError("lr_scaling and lr_base_batch_size need each other: give both, or neither.")
    read_baseline(args.baseline_rate)
    names = [speedup.NAME for speedup in REGISTRY]
    for name, allowed in (("speedups", ["all", *names]), ("without", ["all", "numerics", *names])):
        for word in getattr(args, name) or ():
            if isinstance(word, str) and word not in allowed:
                raise ArgumentError(f"{name}={word!r}: allowed are {', '.join(allowed)}.")


def complete_arguments(args: TrainingArguments | None) -> FastTrainingArguments:
    """Returns `args` themselves, where they lack one of our arguments with its default.

    Nothing is computed anew, and what is changed in them later counts, as in Trainer: they stay the user's object, of
    the user's class. None gives the defaults of all.

    Raises:
        ArgumentError: no training arguments at all; else as `FastTrainingArguments`.
    """
    if args is None:
        return FastTrainingArguments(output_dir="tmp_trainer")  # as Trainer's own
    if not isinstance(args, TrainingArguments):
        raise ArgumentError(
            f"args is a {type(args).__name__}: give hf_ext's FastTrainingArguments, or transformers' TrainingArguments."
        )
    if not isinstance(args, FastTrainingArguments):
        plain: Any = args
        plain.explicit_fields = changed_fields(plain)
        for name, spec in OWN_FIELDS.items():
            if not hasattr(plain, name):
                setattr(plain, name, copy.copy(default_of(spec)))
        check_together(plain.world_size)
        _read_types(plain)
        _check_values(plain)
        return plain
    return args
