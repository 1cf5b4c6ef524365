"""Everything that is said about a generator's outputs, from sequences and arrays to one sentence and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import DataError
from ...evaluation.resampling import ResamplingUnits
from ...evaluation.verdict import MODEL
from ...reporting.tables import format_table
from ..describing import find_scores, score_rows
from .baselines import RANDOM, make_baselines
from .conditions import ConditionEffect
from .copies import judge_diversity, judge_novelty, judge_recovery
from .discriminator import ANTIGENS_UNKNOWN, THRESHOLD, Discriminator, find_doubts, judge_affinities
from .numbering import Numberer
from .rows import AntibodyRows, Sampling, compare_means, mean_score
from .validity import Humanness, judge_validity
from .verdict import CDR3, MEASURES, Comparisons, GenerationVerdict, SetScores, decide

HELD_OUT = "held-out antibodies"


@dataclass(frozen=True)
class Judges:
    """What is asked about antibodies beside what sequences alone say; None is left out, and that is said.

    Attributes:
        numberer: numbers variable domains (extra "numbering"): without it nothing is called strictly valid.
        humanness: OASis (extra "humanness").
        discriminator: predicts affinities.
        threshold: label units of the discriminator; outputs predicted at or above it are counted.
    """

    numberer: Numberer | None = None
    humanness: Humanness | None = None
    discriminator: Discriminator | None = None
    threshold: float = THRESHOLD


@dataclass(frozen=True)
class Judgement:
    """What a report says of a generator.

    Attributes:
        verdict: its first line.
        sets: "model", each baseline, and "held-out antibodies" -> what was measured.
        comparisons: measure -> baseline -> paired comparison; "beats" is an interval above 0.
        effects: whether the model reads its antigen, and pKd.
    """

    verdict: GenerationVerdict
    sets: dict[str, SetScores]
    comparisons: Comparisons
    effects: tuple[ConditionEffect, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The verdict, notes, and the report's table of the model beside its baselines, for a terminal."""
        scores = find_scores({name: one.as_dict() for name, one in self.sets.items()})
        return "\n".join([self.verdict.text, *self.notes, "", format_table(score_rows(scores), ["", *scores])])

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
        """What gates ask for: valid, unique, share_above and correlation (None if not to be believed), beats_random."""
        model = self.sets[MODEL]
        affinities = model.scores["affinities"] or {}
        believed = {} if affinities.get("doubts") else affinities
        against = self.comparisons.get(CDR3, {}).get(RANDOM)
        return {
            "valid": model.valid["value"],
            "unique": model.scores["diversity"]["unique_pairs"]["value"],
            "share_above": believed.get("share_above", {}).get("value"),
            "correlation": (believed.get("correlation") or {}).get("value"),
            "beats_random": against.low if against is not None and against.is_trusted else None,
        }


def judge_generated(
    generated: AntibodyRows,
    training: AntibodyRows,
    held_out: AntibodyRows,
    sampling: Sampling,
    *,
    judges: Judges | None = None,
    effects: Sequence[ConditionEffect] = (),
    asked: Any = None,
    needs_light: bool = True,
) -> Judgement:
    """Judges outputs beside the baselines, on the same antigens and by the same judges.

    Args:
        generated: n outputs with the antigen that each was written for.
        training: what the model was trained on; baselines are made of it.
        held_out: binders of these antigens that training did not hold; of other antigens none is looked at.
        sampling: its units are the antigens, or their clusters, of the n outputs; its seed also makes the baselines.
        judges: see `Judges`.
        effects: from `judge_condition`, of the antigen and of pKd.
        asked: (n,) pKd that each output was asked to have, NaN for none; None: nothing was asked for.
        needs_light: whether a heavy chain alone is no valid output.

    Raises:
        DataError: no outputs, or units of another number of rows.

    Cost: without judges 0.1 s a distinct new pair against 12,000 training pairs, for the model's outputs and one
    baseline's; what numbering costs see `Numberer`.
    """
    if not len(generated):
        raise DataError("There are no outputs to judge: generate some first.")
    judges = judges or Judges()
    unit_of = dict(zip(generated.antigens, sampling.units.unit_of_row.tolist()))
    real = held_out.select([antigen in unit_of for antigen in held_out.antigens])
    units = ResamplingUnits.of(sampling.units.column, [unit_of[antigen] for antigen in real.antigens])
    rows = {MODEL: generated, **make_baselines(generated.antigens, training, sampling.seed), HELD_OUT: real}
    notes = [sampling.units.why_not_enough() or f"Intervals resample {sampling.units.describe()}."]
    predicted: dict[str, np.ndarray] = {}
    doubts: list[str] = []
    if judges.discriminator is not None:
        predicted = {name: judges.discriminator.predict(one) for name, one in rows.items()}
        doubts = find_doubts(judges.discriminator.record, np.concatenate([*predicted.values()]))
        notes.append(ANTIGENS_UNKNOWN)

    def score_set(name: str, one: AntibodyRows) -> SetScores:
        drawn = sampling if name != HELD_OUT else replace(sampling, units=units)
        validity, is_valid = judge_validity(one, drawn, judges.numberer, needs_light)
        novelty, measures = judge_novelty(one, training, drawn)
        recovery = {} if name == HELD_OUT else judge_recovery(one, held_out, sampling.seed)
        measures |= {**recovery, "valid": is_valid}
        humanness = affinities = None
        if judges.humanness is not None:
            measures["humanness"] = judges.humanness.score(one)
            humanness = mean_score(measures["humanness"], drawn)
        if name in predicted:
            measures["affinity"] = predicted[name]
            wanted = asked if name == MODEL else None
            affinities = judge_affinities(predicted[name], drawn, doubts, wanted, judges.threshold)
        scores = {
            "validity": validity,
            "diversity": judge_diversity(one, drawn),
            "novelty": novelty,
            "recovery": {measure: mean_score(values, drawn) for measure, values in recovery.items()},
            "humanness": humanness,
            "affinities": affinities,
        }
        return SetScores(len(one), scores, measures)

    sets = {name: score_set(name, one) for name, one in rows.items()}
    model, baselines = sets[MODEL].measures, [name for name in sets if name not in (MODEL, HELD_OUT)]
    comparisons = {
        measure: {name: compare_means(sets[name].measures[measure], model[measure], sampling) for name in baselines}
        for measure in MEASURES
        if measure in model and np.isfinite(model[measure]).any()
    }
    return Judgement(decide(sets[MODEL], comparisons, effects), sets, comparisons, tuple(effects), tuple(notes))
