"""Heads that a search tries, and what it tries next: small changes of the best so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from ...models.head import HEADS, ONE_LAYER

RATE_STEP = 10**0.5
EPOCH_STEP = 3
DROPOUTS = (0.0, 0.1, 0.3, 0.5)
MAX_RATE, MIN_RATE = 1e-2, 1e-5
LARGE = (1024, 512, 256, 128)  # of --head mlp
MIN_STEPS = 300  # of a first try; fewer tell how fast a head learns, not how well
# Form, sizes, dropout, and the multiple of the run's learning rate. Where a LayerNorm follows, dropout makes training
# and evaluation see other variances: 0.1 there. One hidden layer bears a higher rate than several.
FORMS: tuple[tuple[str, tuple[int, ...], float, float], ...] = (
    ("mlp", (64,), 0.3, 3.0),
    ("product", (64,), 0.3, 3.0),
    ("gated", (64,), 0.3, 3.0),
    ("mlp", (256, 64), 0.1, 1.0),
    ("mlp", LARGE, 0.1, 1.0),
)


@dataclass(frozen=True)
class HeadSettings:
    """A head, and how it is trained.

    Attributes:
        form: "mlp", "product" or "gated"; see `hf_ext.models.head`.
        sizes: of hidden layers.
        dropout: share of units.
        learning_rate: at its peak.
        weight_decay: as in AdamW.
        epochs: after which the learning rate has fallen to its end.
    """

    form: str
    sizes: tuple[int, ...]
    dropout: float
    learning_rate: float
    weight_decay: float
    epochs: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "sizes": list(self.sizes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadSettings:
        """What `to_dict` gave; further entries are left out.

        Raises:
            ValueError: an entry is missing or is no such setting.
        """
        if not isinstance(values, Mapping) or any(one.name not in values for one in fields(cls)):
            raise ValueError(f"{values!r}: no settings of a head")
        found = cls(**{one.name: values[one.name] for one in fields(cls)})
        numbers = (found.dropout, found.learning_rate, found.weight_decay, found.epochs)
        are_numbers = all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers)
        are_sizes = isinstance(found.sizes, list | tuple) and all(type(n) is int and n > 0 for n in found.sizes)
        has_form = found.form == HEADS[0] or (found.form in ONE_LAYER and are_sizes and len(found.sizes) == 1)
        is_trained = are_numbers and found.dropout < 1 and found.epochs > 0
        if not (is_trained and are_sizes and has_form):
            raise ValueError(f"{values!r}: no settings of a head")
        return replace(found, sizes=tuple(found.sizes))

    def num_weights(self, widths: Sequence[int]) -> int:
        """Weights of its matrices on embeddings of these widths."""
        if self.form == "mlp":
            return sum(a * b for a, b in pairwise([sum(widths), *self.sizes, 1]))
        return 2 * sum(widths) * self.sizes[0]


def first_candidates(
    start: HeadSettings, fixed: Collection[str], widths: Sequence[int], steps_per_epoch: int
) -> list[HeadSettings]:
    """Every form, trained briefly, those with the fewest weights first.

    Args:
        start: the run's own settings.
        fixed: names of settings that the user set, which no candidate changes.
        widths: of each input's embedding; one input has no product with others.
        steps_per_epoch: of the run.
    """
    epochs = start.epochs
    if "epochs" not in fixed:
        epochs = min(epochs, max(1, epochs // EPOCH_STEP, math.ceil(MIN_STEPS / steps_per_epoch)))
    candidates = []
    for form, sizes, dropout, multiple in FORMS:
        if form == "product" and len(widths) == 1:
            continue
        rate = min(MAX_RATE, start.learning_rate * multiple)
        changes = {"dropout": dropout, "learning_rate": rate}
        kept = {name: value for name, value in changes.items() if name not in fixed}
        candidates.append(replace(start, form=form, sizes=sizes, epochs=epochs, **kept))
    return sorted(candidates, key=lambda one: one.num_weights(widths))


def trained_longer(one: HeadSettings, start: HeadSettings) -> HeadSettings:
    """`EPOCH_STEP` times the epochs; up to those of `start` first."""
    epochs = one.epochs * EPOCH_STEP
    return replace(one, epochs=min(epochs, start.epochs) if one.epochs < start.epochs else epochs)


def neighbours(best: HeadSettings, start: HeadSettings, fixed: Collection[str]) -> Iterator[HeadSettings]:
    """Changes of one setting of `best` each, in the order in which they are worth a try.

    More epochs than those of `start` come last: they cost most, and seldom help.
    """
    longer = [] if "epochs" in fixed else [trained_longer(best, start)]
    if best.epochs < start.epochs:
        yield from longer
    if "learning_rate" not in fixed:
        for rate in (best.learning_rate / RATE_STEP, best.learning_rate * RATE_STEP):
            if MIN_RATE <= rate <= MAX_RATE:
                yield replace(best, learning_rate=float(f"{rate:.2g}"))
    if "dropout" not in fixed:
        below = [value for value in DROPOUTS if value < best.dropout]
        above = [value for value in DROPOUTS if value > best.dropout]
        for value in (*below[-1:], *above[:1]):
            yield replace(best, dropout=value)
    if "weight_decay" not in fixed:
        yield replace(best, weight_decay=float(f"{best.weight_decay * 10:.2g}"))
    yield from longer
