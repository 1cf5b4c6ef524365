"""`--help` in groups: the flags that people use first; with `--help all` every one, those that few need last."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
from collections.abc import Collection, Mapping
from enum import Enum
from itertools import takewhile
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

ALL = "all"
LAST = "everything else of transformers.TrainingArguments"
# Group -> the training arguments in it. Those of transformers that stand nowhere come last; of other dataclasses
# `_argument_group_name` says it, which is HfArgumentParser's own.
TRAINING_GROUPS: dict[str, tuple[str, ...]] = {
    "data": (),
    "model": (
        *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"),
        *("load_in_8bit", "load_in_4bit", "attention", "activation_checkpointing", "activation_policy"),
        *("activation_budget_gb", "block_pattern", "compile_mode"),
    ),
    "training presets": ("preset", "speedups", "without"),
    "training": (
        *("output_dir", "num_train_epochs", "max_steps", "learning_rate", "encoder_learning_rate", "lr_scheduler_type"),
        *("warmup_steps", "weight_decay", "max_grad_norm", "per_device_train_batch_size", "cached_batch_size"),
        *("gradient_accumulation_steps", "effective_batch_size", "max_tokens_per_batch", "lr_scaling", "optim"),
        *("optim_ext", "bf16", "fp16", "tf32", "torch_compile", "seed", "full_determinism", "use_cpu"),
        *("dataloader_num_workers", "embedding_cache_dir", "max_encoder_noise", "nan_policy", "oom_policy"),
        *("find_batch_size", "nccl_preset"),
    ),
    "logs and reports": (
        *("logging_strategy", "logging_steps", "report_to", "run_name", "disable_tqdm", "torch_profiler"),
        *("baseline_json", "baseline_batches_per_second", "baseline_batch_size", "dollars_per_hour"),
    ),
    "checkpoints": (
        *("resume", "allow_changed", "save_strategy", "save_steps", "save_minutes", "save_total_limit"),
        *("keep_epoch_checkpoint", "save_total_size_gb", "disk_policy", "save_only_model", "local_checkpoint_dir"),
        "max_hours",
    ),
    "evaluation": (
        *("eval_strategy", "eval_steps", "eval_every_epochs", "eval_on_start", "eval_subset"),
        *("per_device_eval_batch_size", "metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
        *("early_stopping_patience", "early_stopping_min_delta"),
    ),
    "hub": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision", "hub_token"),
        "hub_always_push",
    ),
    LAST: (),
}
STOCK_FIELDS = frozenset(field.name for field in dataclasses.fields(TrainingArguments))
_DEFAULT_IN_TEXT = re.compile(r"\s*Defaults? (to|is) [^.]*\.?$")  # transformers' own, which a recipe may have changed


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
    `--help` shows the fields that `_first_flags` of a dataclass names, its own and others of the parser, and says that
    `--help all` shows the rest; where no dataclass has such a table, it shows all. Parsing is that of the parent class.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        types: list[Any] = (
            [dataclass_types] if dataclasses.is_dataclass(dataclass_types) else [*(dataclass_types or ())]
        )
        self._group_of = {
            field.name: _group(dtype, field.name) for dtype in types for field in dataclasses.fields(dtype)
        }
        self._first_flags = {name for dtype in types for name in getattr(dtype, "_first_flags", ())}
        listed = [name for dtype in types for name in getattr(dtype, "_argument_groups", ())]
        own = [name for name in [*listed, *self._group_of.values()] if name and name not in TRAINING_GROUPS]
        self._order = dict.fromkeys([*own, *TRAINING_GROUPS])
        self._groups: dict[str | None, Any] = {}
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(types, **{**kwargs, "add_help": False})
        self.add_argument(
            "-h",
            "--help",
            action=ShowHelp,
            default=argparse.SUPPRESS,
            help="The flags that people use first; all: every one.",
        )

    def shown_defaults(self) -> Mapping[str, Any]:
        """Field -> what it has where nobody gives it."""
        return {}

    def format_help(self) -> str:
        """The first page, of the flags that people use first."""
        if not self._first_flags:
            return self.format_all_help()
        first, *rest = (self.description or "").split("\n\n")
        examples = takewhile(lambda paragraph: paragraph.startswith(" "), rest)
        num_flags = len({action.dest for action in self._actions if action.option_strings})
        more = f"All {num_flags} flags, and more on them: {self.prog} --help {ALL}"
        left_out = {name for name in self._group_of if name not in self._first_flags}
        return self._format("\n\n".join([first, *examples]), more, left_out)

    def format_all_help(self) -> str:
        """The page of all flags."""
        return self._format(self.description, self.epilog)

    def _format(self, description: str | None, epilog: str | None, left_out: Collection[str] = ()) -> str:
        """As argparse, with the defaults that are in effect, and each flag in one spelling: --no_x is --x false."""
        page, defaults = self._get_formatter(), self.shown_defaults()
        page.add_usage(self.usage, self._actions, [])
        page.add_text(description)
        shown = set(left_out)
        for group in self._action_groups:
            page.start_section(group.title)
            for action in group._group_actions:
                if action.dest not in shown:
                    page.add_argument(self._shown(action, defaults.get(action.dest, action.default)))
                    shown.add(action.dest)
            page.end_section()
        page.add_text(epilog)
        return page.format_help()

    def _shown(self, action: argparse.Action, default: Any) -> argparse.Action:
        shown = copy.copy(action)
        shown.default = _as_typed(default)
        if action.dest in self._group_of:
            shown.option_strings = action.option_strings[:1]
            shown.help = _DEFAULT_IN_TEXT.sub("", action.help or "")
        return shown

    def _parse_dataclass_field(self, parser: Any, field: dataclasses.Field) -> None:  # type: ignore[override]
        if not self._groups:  # in the order in which help prints them; those that stay empty are not printed
            self._groups = {name: self.add_argument_group(name) for name in self._order} | {None: self}
        HfArgumentParser._parse_dataclass_field(self._groups[self._group_of[field.name]], field)


def _group(dtype: Any, name: str) -> str | None:
    """The group of a field of a dataclass; None: among the options."""
    own: Mapping[str, tuple[str, ...]] = getattr(dtype, "_argument_groups", {})
    groups = [*own.items(), *(TRAINING_GROUPS.items() if issubclass(dtype, TrainingArguments) else ())]
    found = next((group for group, names in groups if name in names), None)
    if found is None and issubclass(dtype, TrainingArguments) and name in STOCK_FIELDS:
        return LAST
    return found or getattr(dtype, "_argument_group_name", None)


def _as_typed(value: Any) -> Any:
    """A default as somebody would type it: `all` for ["all"], `linear` for SchedulerType.LINEAR."""
    if isinstance(value, list | tuple):
        return " ".join(str(_as_typed(one)) for one in value) or "none given"
    return value.value if isinstance(value, Enum) else value
