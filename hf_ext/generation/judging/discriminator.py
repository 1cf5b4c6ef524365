"""A trained affinity model that judges generated antibodies, and what it is worth by its own record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...affinity.predictor import AffinityPredictor, find_model
from ...errors import ArgumentError
from ...evaluation._arrays import FloatArray, as_pair
from ...evaluation.alarms import MIN_SPREAD_RATIO
from ...evaluation.metrics import value_of
from ...evaluation.scores import Score, score_predictions
from .rows import CONFIDENCE, AntibodyRows, Sampling, mean_score
from .validity import find_structure_problems

RECORD = "all_results.json"
THRESHOLD = 7.0  # pKd: 100 nM
MIN_SPREAD = 0.05  # label units; a discriminator whose predictions spread less says one thing about everything
ANTIGENS_UNKNOWN = "Whether the discriminator was trained on these antigens is not known."
_NAMES = {  # how columns are called, with - and blanks as _
    "heavy": ("heavy", "vh", "h"),
    "light": ("light", "vl", "l"),
    "antigen": ("antigen", "ag", "target"),
}


@dataclass(frozen=True)
class Discriminator:
    """Predicts the affinity of antibodies for their antigens.

    Attributes:
        predictor: of a trained affinity model.
        roles: column that it reads -> "heavy", "light" or "antigen".
        record: its `all_results.json`; None where that was not beside it.
    """

    predictor: AffinityPredictor
    roles: Mapping[str, str]
    record: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, device: str | None = None) -> Discriminator:
        """Loads what `recipes/max_speed.py` wrote, from a folder or from the Hub, with its record where there is one.

        Raises:
            ArgumentError: as `AffinityPredictor.from_pretrained`; columns that cannot be told apart; a damaged record.

        Cost: as `AffinityPredictor.from_pretrained`.
        """
        folder = find_model(name_or_path)
        predictor = AffinityPredictor.from_pretrained(folder, device=device)
        return cls(predictor, find_roles(predictor.columns), read_record(folder))

    def predict(self, rows: AntibodyRows) -> FloatArray:
        """(n,) label units; NaN for rows that it cannot read: malformed, no such chain, too long for its encoder.

        Raises:
            DataError: an antigen holds what is no residue, or a prediction is not finite.
        """
        columns = {name: rows.antigens if one == "antigen" else rows.chain(one) for name, one in self.roles.items()}
        collator = self.predictor.collator
        required = {role for name, role in self.roles.items() if name not in collator.missing_chains}
        readable = np.array([one is None for one in find_structure_problems(rows, "light" in required)], dtype=bool)
        for name, parts in collator.columns.items():
            limit = collator.tokenizers[name].max_residues
            if limit is not None and collator.too_long == "error":
                readable &= np.sum([[len(one) for one in columns[part]] for part in parts], axis=0) <= limit
        found = np.full(len(rows), np.nan)
        if readable.any():
            chosen = {name: [one for one, keep in zip(values, readable) if keep] for name, values in columns.items()}
            found[readable] = self.predictor.predict(chosen)
        return found


def find_roles(columns: Sequence[str]) -> dict[str, str]:
    """Which of heavy chain, light chain and antigen each column of a model is, by a word of its name.

    Raises:
        ArgumentError: names do not tell, or tell the same of two.
    """
    words = {name: {*name.lower().replace("-", "_").replace(" ", "_").split("_")} for name in columns}
    fitting = {name: [role for role, known in _NAMES.items() if words[name] & {*known}] for name in columns}
    roles = {name: each[0] for name, each in fitting.items() if len(each) == 1}
    if len({*roles.values()}) < len(columns):
        known = "; ".join(f"{role}: {', '.join(names)}" for role, names in _NAMES.items())
        raise ArgumentError(
            f"The discriminator reads {', '.join(columns)}: which of them is the heavy chain, the light chain and the "
            f"antigen is not clear. Train it on columns with one of these words in their names ({known})."
        )
    return roles


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """`all_results.json` of a model's folder; None where it is not there, as on the Hub.

    Raises:
        ArgumentError: it is there and damaged.
    """
    path = Path(folder) / RECORD
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise ArgumentError(f"{path}: damaged, no JSON ({error}). Copy the model's folder again.") from error


def find_doubts(record: Mapping[str, Any] | None, predicted: FloatArray | None = None) -> list[str]:
    """What speaks against a discriminator: clauses, none where its numbers may be believed.

    Args:
        record: its `all_results.json`; None: unknown, which is a doubt.
        predicted: label units, NaN for none, all that it said of outputs, baselines and held-out antibodies; it must
            tell something from something. None: it has said nothing yet.
    """
    doubts = []
    verdict = (record or {}).get("verdict") or {}
    if verdict.get("outcome") is None:
        doubts.append("what it is worth is not known: no verdict of its own test is beside it")
    elif verdict["outcome"] != "better":
        doubts.append(f"its own record says: {str(verdict.get('text', verdict['outcome'])).splitlines()[0]}")
    if predicted is None:
        return doubts
    known = predicted[~np.isnan(predicted)]
    if not len(known):
        return [*doubts, "it could read none of the outputs"]
    std = (((record or {}).get("labels") or {}).get("test") or {}).get("std")
    least = MIN_SPREAD_RATIO * std if isinstance(std, int | float) and std > 0 else MIN_SPREAD
    spread = float(known.std())
    if len(known) > 1 and spread < least:
        doubts.append(
            f"it has collapsed: {len(known):,} predictions all lie about {float(np.median(known)):.2f} (standard "
            f"deviation {spread:.2g}, where {least:.2g} is the least)"
        )
    return doubts


def judge_affinities(
    predicted: FloatArray,
    sampling: Sampling,
    doubts: Sequence[str] = (),
    asked: Any = None,
    threshold: float = THRESHOLD,
) -> dict[str, Any]:
    """Scores predictions for the outputs.

    Args:
        predicted: (n,) label units; NaN where it could not predict.
        sampling: its units are those of these rows.
        doubts: from `find_doubts`.
        asked: (n,) pKd that each output was asked to have, NaN for none; None: nothing was asked for.
        threshold: label units.

    Returns:
        JSON-able:
            threshold: label units.
            share_above: outputs predicted at or above it; one that cannot be predicted is not.
            mean: predicted, label units, of those that can be.
            correlation: Spearman between asked-for and predicted; None where nothing was asked for.
            num_refused: outputs that the discriminator cannot read.
            doubts: why these numbers are not to be believed; empty where they may be.

    Raises:
        DataError: other numbers of rows.
    """
    return {
        "threshold": threshold,
        "share_above": mean_score(np.nan_to_num(predicted, nan=-np.inf) >= threshold, sampling),
        "mean": mean_score(predicted, sampling),
        "correlation": None if asked is None else _correlate(predicted, asked, sampling),
        "num_refused": int(np.isnan(predicted).sum()),
        "doubts": list(doubts),
    }


def _correlate(predicted: FloatArray, asked: Any, sampling: Sampling) -> Score:
    predicted, wanted = as_pair(predicted, asked)
    has_both = ~(np.isnan(wanted) | np.isnan(predicted))
    predicted, wanted, units = predicted[has_both], wanted[has_both], sampling.units.select(has_both)
    has_value = len(wanted) > 1 and not value_of("spearman", predicted, wanted).undefined
    num = sampling.num_resamples if has_value else 0
    found = score_predictions(
        predicted, wanted, threshold=None, num_resamples=num, confidence=CONFIDENCE, seed=sampling.seed, units=units
    )["spearman"]
    # Units of one row each are taken for rows there, which are trusted however few they are.
    return {**found, **units.facts(), "is_trusted": units.are_enough}
