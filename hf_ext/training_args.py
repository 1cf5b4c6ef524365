"""TrainingArguments with what hf_ext adds. With no preset and no flag they mean what stock Trainer means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from transformers import TrainingArguments

from .errors import ArgumentError
from .speedups import REGISTRY


@dataclass
class FastTrainingArguments(TrainingArguments):
    """As `transformers.TrainingArguments`, plus the speed-ups and what they need.

    Constructs on CPU, T4 and A100 alike: whether a request fits the machine is the plan's decision, not this class's.
    """

    preset: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "Preset(s) these arguments came from, joined by '+'. Recorded in the plan."}
    )
    speedups: list[str] = field(
        default_factory=list,
        metadata={"help": "Speed-ups to use where they fit: names, or 'all' (those that leave learning as it is)."},
    )
    without: list[str] = field(default_factory=list, metadata={"help": "Speed-ups to leave out of --speedups all."})
    effective_batch_size: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "Rows per optimizer step over all processes; sets accumulation. Class L."}
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = field(
        default="none", metadata={"help": "How the learning rate follows the effective batch size. Class L."}
    )
    cached_batch_size: None | int = field(  # noqa: RUF036
        default=None,
        metadata={"help": "Largest batch for heads on cached embeddings, unless --per_device_train_batch_size is set."},
    )
    embedding_cache_dir: str = field(
        default="~/.cache/hf_ext/embeddings", metadata={"help": "Where embeddings of frozen encoders are kept."}
    )
    embedding_tokens_per_batch: None | int = field(  # noqa: RUF036
        default=None, metadata={"help": "Residues per encoding batch; halves itself when memory runs out."}
    )
    max_encoder_noise: float = field(
        default=0.05,
        metadata={"help": "Half-precision encoders are used if their rounding stays below this share of the spread."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [speedup.NAME for speedup in REGISTRY]
        unknown = [name for name in [*self.speedups, *self.without] if name not in [*known, "all"]]
        if unknown:
            raise ArgumentError(f"Unknown speed-up(s) {unknown}. Known: all, {', '.join(known)}.")
        for name in ("effective_batch_size", "cached_batch_size", "embedding_tokens_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name}={value}: must be at least 1.")
        self._explicit: frozenset[str] | None = None

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Fields that the user set: as the parser recorded, or, built in code, those that differ from the default."""
        if self._explicit is not None:
            return self._explicit
        pristine = {f.name: _default(f) for f in dataclasses.fields(self)}
        return frozenset(name for name, default in pristine.items() if getattr(self, name) != default)

    def mark_explicit(self, names: frozenset[str]) -> None:
        """Records which fields came from the command line or YAML; others may be set by the plan."""
        self._explicit = names


def _default(spec: dataclasses.Field) -> object:
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
