"""Arguments of ours whose names other dataclasses of a command line may have too, and their two spellings.

`HfArgumentParser` refuses two fields of one name: `max_eval_samples` stands in the data arguments of Hugging Face's
example scripts, the settings of LoRA and of weights in few bits in TRL's `ModelConfig`. So these fields of
`FastTrainingArguments` end in `_ext`, which is their flag beside such a class. In Python, and wherever nothing else has
the short name, that is theirs.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Container, Iterable
from typing import Any

SHORT_NAMES = (
    *("max_eval_samples", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("use_rslora", "use_dora", "load_in_8bit", "load_in_4bit"),
)
# Argument -> what other programs call it; in the order in which they are proposed.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch bs batch_size train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epoch epochs num_epochs",
    "weight_decay": "wd",
    "warmup_steps": "warmup warmup_ratio",
    "encoders": "model models model_name encoder model_name_or_path",
    "model_name_or_path": "model model_name encoder encoders",
    "dataset_name": "data dataset train_file csv input fasta",
    "label_column": "label labels target",
    "sequence_columns": "sequence sequences seq",
    "output_dir": "out output outdir",
}
# Subcommand -> arguments of it alone, which people give to others.
_OF_COMMAND = {"doctor": "device plan_scale gpus json", "evaluate": "test_of", "sample": "antigen num_samples"}
_FIELD_OF = {name: f"{name}_ext" for name in SHORT_NAMES}
_NAME_OF = {field: name for name, field in _FIELD_OF.items()}


def short_name(field_name: str) -> str:
    """The name of an argument by that of its field."""
    return _NAME_OF.get(field_name, field_name)


def with_short_name(field: dataclasses.Field, taken: Container[str] = ()) -> dataclasses.Field:
    """A copy of `field` under its short name; the same one where it has none, or that is in `taken`."""
    name = short_name(field.name)
    if name == field.name or name in taken:
        return field
    named = copy.copy(field)
    named.name = name
    return named


class ShortName:
    """An attribute that is another name of the field that ends in `_ext`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = _FIELD_OF[name]

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance, self._field)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self._field, value)


class TakesShortNames(type):
    """Of dataclasses, and of those derived from them, that take the short names as keywords as well."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError for an argument given by both names, as `dataclasses.replace` does with the short ones."""
        for name in [name for name in kwargs if name in _FIELD_OF]:
            if _FIELD_OF[name] in kwargs:
                raise TypeError(f"{name} and {_FIELD_OF[name]} are one argument: give {_FIELD_OF[name]} alone.")
            kwargs[_FIELD_OF[name]] = kwargs.pop(name)
        return super().__call__(*args, **kwargs)


def is_secret(name: str) -> bool:
    """Whether an argument of this name may hold a token."""
    return name.endswith("token")


def name_nearest(name: str, known: Iterable[str]) -> str:
    """What a message about an unknown name goes on with: the known one that it may be; "" where none is near."""
    known, bare = list(known), name.lstrip("-").replace("-", "_")
    for command, names in _OF_COMMAND.items():
        if bare in names.split():
            return f", did you mean that of `hf-ext {command}`?"
    ours = [word for one, others in _OTHER_NAMES.items() if bare in others.split() for word in (f"--{one}", one)]
    close = [word for word in ours if word in known] or difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
