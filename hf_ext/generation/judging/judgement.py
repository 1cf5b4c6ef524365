"""Everything that is said about a generator's outputs, from sequences and arrays to one sentence and its tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import ArgumentError, DataError
from ...evaluation._arrays import FloatArray
from ...evaluation.resampling import ResamplingUnits
from .affinities import THRESHOLD, judge_affinities
from .baselines import RANDOM, make_baselines
from .comparison import (
    CDR3,
    HELD_OUT,
    MEASURES,
    MODEL,
    Comparisons,
    SetScores,
    compare_sets,
    format_comparisons,
    format_sets,
)
from .conditions import ConditionEffect
from .discriminator import Discriminator, Trust, examine_record
from .diversity import judge_diversity
from .humanness import Humanness
from .novelty import judge_novelty
from .numbering import Domains, Numberer
from .recovery import Recovery, judge_recovery
from .rows import AntibodyRows
from .scores import Sampling, mean_score
from .validity import judge_validity
from .verdict import GenerationVerdict, decide


@dataclass(frozen=True)
class Judges:
    """What is asked about antibodies beside what sequences alone say; None is left out, and that is said.

    Attributes:
        numberer: numbers variable domains (extra "numbering"): without it nothing is called strictly valid.
        humanness: OASis (extra "humanness").
        discriminator: predicts affinities.
        discriminator_antigens: those that it was trained on; None: unknown, which is said.
        threshold: label units of the discriminator; outputs predicted at or above it are counted.
    """

    numberer: Numberer | None = None
    humanness: Humanness | None = None
    discriminator: Discriminator | None = None
    discriminator_antigens: Collection[str] | None = None
    threshold: float = THRESHOLD


@dataclass(frozen=True)
class Judgement:
    """What a report says of a generator.

    Attributes:
        verdict: its first line.
        sets: "model", each baseline, and "held-out antibodies" where there are any -> what was measured.
        comparisons: measure -> baseline -> paired comparison; "beats" is an interval above 0.
        effects: whether the model reads its antigen, and pKd.
    """

    verdict: GenerationVerdict
    sets: dict[str, SetScores]
    comparisons: Comparisons
    effects: tuple[ConditionEffect, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def text(self) -> str:
        """The verdict, notes and both tables, for a terminal or a report."""
        lines = [self.verdict.text, *self.notes, *(f"The model {one.text}." for one in self.effects), ""]
        lines += [format_sets(self.sets), "", format_comparisons(self.comparisons)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "verdict": self.verdict.as_dict(),
            "sets": {name: one.as_dict() for name, one in self.sets.items()},
            "comparisons": {
                measure: {name: one.as_dict() for name, one in each.items()}
                for measure, each in self.comparisons.items()
            },
            "effects": [one.as_dict() for one in self.effects],
            "notes": list(self.notes),
        }

    def numbers(self) -> dict[str, float | None]:
        """What gates ask for, as plain values: valid, unique, share_above, correlation, beats_random."""
        model = self.sets[MODEL]
        affinities = model.affinities if model.affinities is not None and model.affinities.is_trusted else None
        correlation = None if affinities is None else affinities.correlation
        against = self.comparisons.get(self.verdict.measure, {}).get(RANDOM)
        return {
            "valid": model.validity.decisive["value"],
            "unique": model.diversity.unique_pairs["value"],
            "share_above": None if affinities is None else affinities.share_above["value"],
            "correlation": None if correlation is None else correlation["value"],
            "beats_random": against.low if against is not None and against.is_trusted else None,
        }


def judge_generated(
    generated: AntibodyRows,
    training: AntibodyRows,
    held_out: AntibodyRows | None,
    sampling: Sampling,
    *,
    judges: Judges | None = None,
    effects: Sequence[ConditionEffect] = (),
    asked: Any = None,
    measure: str = CDR3,
    is_greedy: bool = False,
    needs_light: bool = True,
    with_baselines: bool = True,
) -> Judgement:
    """Judges outputs beside the baselines, on the same antigens and by the same judges.

    Args:
        generated: n outputs with the antigen that each was written for.
        training: what the model was trained on; baselines are made of it.
        held_out: binders of the antigens that training did not hold; None: nothing is recovered, no baseline beaten.
        sampling: its units are the antigens, or their clusters, of the n outputs; its seed also makes the baselines.
        judges: see `Judges`.
        effects: from `judge_condition`, of the antigen and of pKd.
        asked: (n,) pKd that each output was asked to have, NaN for none; None: nothing was asked for.
        measure: of `MEASURES`, by which baselines are to be beaten.
        is_greedy: outputs were decoded without sampling, see `judge_diversity`.
        needs_light: whether a heavy chain alone is no valid output.
        with_baselines: False for a quick look at the model alone, as each epoch takes.

    Raises:
        ArgumentError: no such measure.
        DataError: no outputs, or units of another number of rows.

    Cost: without judges 0.1 s a distinct new pair against 12,000 training pairs, for the model's outputs and one
    baseline's; what numbering costs see `Numberer`.
    """
    if measure not in MEASURES:
        raise ArgumentError(f"measure={measure!r}: one of {', '.join(MEASURES)} is needed.")
    if not len(generated):
        raise DataError("There are no outputs to judge: generate some first.")
    case = _Case(generated.antigens, training, held_out, judges or Judges(), sampling, is_greedy, needs_light)
    rows = {MODEL: generated}
    if with_baselines:
        rows |= make_baselines(generated.antigens, training, sampling.seed)
    real = _held_out_rows(held_out, generated, sampling)
    everything = rows if real is None else {**rows, HELD_OUT: real[0]}
    predicted = case.predict(everything)
    sets = {name: case.score(name, one, predicted, asked if name == MODEL else None) for name, one in rows.items()}
    comparisons = compare_sets(sets[MODEL], {name: one for name, one in sets.items() if name != MODEL}, sampling)
    verdict = decide(sets[MODEL], comparisons, effects, measure)
    if real is not None:
        sets[HELD_OUT] = case.score(HELD_OUT, real[0], predicted, None, real[1])
    few = sampling.units.why_not_enough()
    notes = (few or f"Intervals resample {sampling.units.describe()}.",)
    return Judgement(verdict, sets, comparisons, tuple(effects), notes)


@dataclass(frozen=True)
class _Case:
    """What every set of antibodies is held against."""

    antigens: Sequence[str]
    training: AntibodyRows
    held_out: AntibodyRows | None
    judges: Judges
    sampling: Sampling
    is_greedy: bool
    needs_light: bool

    def predict(self, sets: Mapping[str, AntibodyRows]) -> dict[str, FloatArray]:
        """Affinities of each set; nothing without a discriminator."""
        discriminator = self.judges.discriminator
        return {} if discriminator is None else {name: discriminator.predict(rows) for name, rows in sets.items()}

    def score(
        self,
        name: str,
        rows: AntibodyRows,
        predicted: Mapping[str, FloatArray],
        asked: Any,
        sampling: Sampling | None = None,
    ) -> SetScores:
        sampling = sampling or self.sampling
        validity = judge_validity(rows, sampling, self.judges.numberer, self.needs_light)
        recovery = None if name == HELD_OUT else self._recover(rows)
        humanness = None if self.judges.humanness is None else self.judges.humanness.score(rows)
        affinities = None
        if name in predicted:
            others = {other: values for other, values in predicted.items() if other != name}
            options = {"trust": self._trust(), "asked": asked, "others": others, "threshold": self.judges.threshold}
            affinities = judge_affinities(predicted[name], sampling, **options)
        measures = {
            **({} if recovery is None else {CDR3: recovery.cdr3, "heavy": recovery.heavy, "light": recovery.light}),
            "valid": validity.is_valid.astype(np.float64),
            **({} if humanness is None else {"humanness": humanness}),
            **({"affinity": predicted[name]} if name in predicted else {}),
        }
        return SetScores(
            name,
            len(rows),
            validity,
            judge_diversity(rows, sampling, self.is_greedy and name == MODEL),
            judge_novelty(rows, self.training, sampling),
            {} if recovery is None else recovery.scores(sampling),
            None if humanness is None else mean_score(humanness, sampling),
            affinities,
            measures,
        )

    def _recover(self, rows: AntibodyRows) -> Recovery | None:
        if self.held_out is None or not len(self.held_out):
            return None
        numberer = self.judges.numberer
        both = [None, None] if numberer is None else [Domains.of(each, numberer) for each in (rows, self.held_out)]
        return judge_recovery(rows, self.held_out, both[0], both[1], self.sampling.seed)

    def _trust(self) -> Trust:
        assert self.judges.discriminator is not None
        return examine_record(self.judges.discriminator.record, self.antigens, self.judges.discriminator_antigens)


def _held_out_rows(
    held_out: AntibodyRows | None, generated: AntibodyRows, sampling: Sampling
) -> tuple[AntibodyRows, Sampling] | None:
    """The binders of the antigens that were asked for, drawn by the same units as the outputs for them."""
    if held_out is None:
        return None
    unit_of = dict(zip(generated.antigens, sampling.units.unit_of_row.tolist()))
    chosen = np.array([antigen in unit_of for antigen in held_out.antigens], dtype=bool)
    if not chosen.any():
        return None
    rows = held_out.select(chosen)
    units = ResamplingUnits.of(sampling.units.column, [unit_of[antigen] for antigen in rows.antigens])
    return rows, Sampling(units, sampling.confidence, sampling.num_resamples, sampling.seed)
