"""`--help` in groups: the flags that people use first; with `--help all` every one, those that few need last."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import takewhile
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from .argument_names import with_short_name

ALL = "all"
LAST = "everything else of transformers.TrainingArguments"
# Group -> the training arguments in it, as they are typed. Those of transformers that stand nowhere come last; of other
# dataclasses `_argument_group_name` says it, which is HfArgumentParser's own.
TRAINING_GROUPS: dict[str, tuple[str, ...]] = {
    "data": (),
    "model": (
        *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"),
        *("load_in_8bit", "load_in_4bit"),
        *("attention", "activation_checkpointing", "activation_policy", "activation_budget_gb"),
        *("block_pattern", "compile_mode"),
    ),
    "training presets": ("preset", "speedups", "without"),
    "training": (
        *("output_dir", "num_train_epochs", "max_steps", "learning_rate", "encoder_learning_rate", "lr_scheduler_type"),
        *("warmup_steps", "weight_decay", "max_grad_norm", "per_device_train_batch_size", "cached_batch_size"),
        *("gradient_accumulation_steps", "effective_batch_size", "max_tokens_per_batch"),
        *("lr_scaling", "optim", "optim_ext", "bf16", "fp16", "tf32", "torch_compile", "seed", "full_determinism"),
        *("use_cpu", "dataloader_num_workers", "embedding_cache_dir"),
        *("max_encoder_noise", "nan_policy", "oom_policy", "find_batch_size", "nccl_preset"),
    ),
    "logs and reports": (
        *("logging_strategy", "logging_steps", "report_to", "run_name", "disable_tqdm"),
        *("torch_profiler", "baseline_json", "baseline_batches_per_second", "baseline_batch_size"),
        "dollars_per_hour",
    ),
    "checkpoints": (
        *("resume", "allow_changed", "save_strategy", "save_steps", "save_minutes", "save_total_limit"),
        *("keep_epoch_checkpoint", "save_total_size_gb", "disk_policy", "save_only_model"),
        *("local_checkpoint_dir", "max_hours"),
    ),
    "evaluation": (
        *("eval_strategy", "eval_steps", "eval_every_epochs", "eval_on_start", "max_eval_samples"),
        *("per_device_eval_batch_size", "metric_for_best_model"),
        *("greater_is_better", "load_best_model_at_end", "early_stopping_patience", "early_stopping_min_delta"),
    ),
    "hub": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision", "hub_token"),
        "hub_always_push",
    ),
    LAST: (),
}
_DEFAULT_IN_TEXT = re.compile(r"\s*Defaults? (to|is) [^.]*\.?$")  # transformers' own, which a recipe may have changed
_GROUP_OF = {name: group for group, names in TRAINING_GROUPS.items() for name in names}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of descriptions."""


class ShowHelp(argparse.Action):
    """`--help`: prints the first page, or with the word `all` the whole, and ends the program."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", choices=(ALL,), metavar=ALL, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_all_help() if values == ALL else parser.format_help(), end="")
        parser.exit()


class GroupedArgumentParser(HfArgumentParser):
    """`HfArgumentParser` whose help has the fields of its dataclasses in groups, and a place for other defaults.

    A dataclass of its own stands in the group that its `_argument_group_name` says, or in several that its
    `_argument_groups` names, {group: (field, ...)}: before all others unless that is one of `TRAINING_GROUPS`; without
    either, among the options. Training arguments stand as `TRAINING_GROUPS` says.
    `--help` shows the fields that `_first_flags` of a dataclass names, its own and others of the parser, as they are
    typed, and says that `--help all` shows the rest; where no dataclass has such a table, it shows all.
    Parsing is that of the parent class.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        given = [dataclass_types] if dataclasses.is_dataclass(dataclass_types) else [*(dataclass_types or ())]
        self._taken = frozenset(field.name for dtype in given for field in dataclasses.fields(dtype))
        self._group_of = {field.name: name for dtype in given for field, name in _groups(dtype, self._taken)}
        listed = [name for dtype in given for name in getattr(dtype, "_argument_groups", ())]
        names = dict.fromkeys([*listed, *filter(None, self._group_of.values())])
        self._order = [*(name for name in names if name not in TRAINING_GROUPS), *TRAINING_GROUPS]
        self._groups: dict[str, Any] = {}
        self._first_flags = frozenset(name for dtype in given for name in getattr(dtype, "_first_flags", ()))
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(dataclass_types, **{**kwargs, "add_help": False})
        if kwargs.get("add_help", True):
            one_line = "The flags that people use first; all: every one."
            for action in self._actions:
                action.help = _DEFAULT_IN_TEXT.sub("", action.help) if action.help else None
            self.add_argument("-h", "--help", action=ShowHelp, default=argparse.SUPPRESS, help=one_line)

    def shown_defaults(self) -> Mapping[str, Any]:
        """Field -> the value that it has where nobody gives one, where that is not the dataclass's own default."""
        return {}

    def format_help(self) -> str:
        """The first page: as argparse, with the defaults that are in effect, of the flags that people use first."""
        if not self._first_flags:
            return self.format_all_help()
        description, epilog = self.description, self.epilog
        self.description = _first_paragraphs(description or "")
        self.epilog = f"All {self._count_flags()} flags, and more on them: {self.prog} --help {ALL}"
        try:
            with self._showing(self.shown_defaults(), self._first_flags):
                return super().format_help()
        finally:
            self.description, self.epilog = description, epilog

    def format_all_help(self) -> str:
        """As argparse, with the defaults that are in effect, and with all flags."""
        with self._showing(self.shown_defaults()):
            return super().format_help()

    def _count_flags(self) -> int:
        return len({action.dest for action in self._actions if action.option_strings})

    @contextmanager
    def _showing(self, values: Mapping[str, Any], only: frozenset[str] | None = None) -> Iterator[None]:
        """Inside, actions have the defaults `values`, and those whose field is not in `only` no help."""
        before = [(action, dict(vars(action))) for action in self._actions]
        met: set[str] = set()
        try:
            for action in self._actions:
                is_twin = action.dest in met  # --no_x, after --x
                met.add(action.dest)
                action.default = argparse.SUPPRESS if is_twin else _as_typed(values.get(action.dest, action.default))
                if only is not None and action.dest in self._group_of:
                    action.option_strings = action.option_strings[:1]  # not --with-dashes too
                    if is_twin or action.dest not in only:
                        action.help = argparse.SUPPRESS
            yield
        finally:
            for action, attributes in before:
                vars(action).update(attributes)

    def _named(self, field: dataclasses.Field) -> dataclasses.Field:
        return with_short_name(field, self._taken)

    def _parse_dataclass_field(self, parser: Any, field: dataclasses.Field) -> None:  # type: ignore[override]
        named = self._named(field)
        if not self._groups:  # in the order in which help prints them; those that stay empty are not printed
            self._groups = {name: self.add_argument_group(name) for name in self._order}
        group = self._groups.get(self._group_of.get(named.name) or "", self)
        HfArgumentParser._parse_dataclass_field(group, named)


def _groups(dtype: Any, taken: Iterable[str]) -> Iterator[tuple[dataclasses.Field, str | None]]:
    """The fields of a dataclass under the names in which they are typed, each with its group."""
    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    own_groups = {name: group for group, names in getattr(dtype, "_argument_groups", {}).items() for name in names}
    for field in dataclasses.fields(dtype):
        named = with_short_name(field, frozenset(taken))
        own = own_groups.get(named.name, getattr(dtype, "_argument_group_name", None))
        if issubclass(dtype, TrainingArguments):
            short = with_short_name(field).name
            yield named, _GROUP_OF.get(short, LAST if field.name in stock else own)
        else:
            yield named, own


def _first_paragraphs(description: str) -> str:
    """What something is, and the examples that follow: the first paragraph, and those after it that are indented."""
    first, *rest = description.split("\n\n")
    return "\n\n".join([first, *takewhile(lambda paragraph: paragraph.startswith(" "), rest)])


def _as_typed(value: Any) -> Any:
    """A default as somebody would type it: `all` for ["all"], `linear` for SchedulerType.LINEAR."""
    if isinstance(value, list | tuple):
        return " ".join(str(_as_typed(one)) for one in value) or "none given"
    return value.value if isinstance(value, Enum) else value
