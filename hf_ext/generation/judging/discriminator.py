"""A trained affinity model that judges generated antibodies, and what it is worth by its own record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints import find_model
from ...errors import ArgumentError, DataError
from ...evaluation import FloatArray, Score, score_predictions
from ...property import AffinityPredictor
from ...reporting import RunRecord, VerdictRecord, read_record
from ..rows import AntibodyRows, Sampling, by_groups, find_form_problems, mean_score

THRESHOLD = 7.0  # pKd: 100 nM
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
        doubt: why its numbers are not to be believed, a clause; None where its own record says that it beat every
            baseline.
    """

    predictor: AffinityPredictor
    roles: Mapping[str, str]
    doubt: str | None

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, device: str | None = None) -> Discriminator:
        """Loads what `hf-ext train` wrote, from a folder or from the Hub.

        Raises:
            ArgumentError: as `AffinityPredictor.from_pretrained`; columns that cannot be told apart; a model that
                predicts something else than one number per row.

        Cost: as `AffinityPredictor.from_pretrained`.
        """
        folder = find_model(name_or_path)
        predictor = AffinityPredictor.from_pretrained(folder, device=device)
        kind = predictor.model.config.kind
        if not kind.is_one_number:
            raise ArgumentError(f"{name_or_path} predicts {kind.task}: antibodies are judged by one number per row.")
        return cls(predictor, find_roles(predictor.columns), find_doubt(folder))

    def predict(self, rows: AntibodyRows) -> FloatArray:
        """Predicts affinities, (n,), label units; NaN for rows that it cannot read: malformed, no such chain, too long.

        Raises:
            DataError: an antigen holds what is no residue, or a prediction is not finite.
        """
        columns = {name: rows.antigens if one == "antigen" else rows.chain(one) for name, one in self.roles.items()}
        collator = self.predictor.collator
        required = {role for name, role in self.roles.items() if name not in collator.missing_chains}
        readable = np.array([one is None for one in find_form_problems(rows, "light" in required)], dtype=bool)
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
    """Finds which of heavy chain, light chain and antigen each column of a model is, by a word of its name.

    Raises:
        ArgumentError: names do not tell, or tell the same of two.
    """
    words = {name: {*re.split("[-_ ]", name.lower())} for name in columns}
    fitting = {name: [role for role, known in _NAMES.items() if words[name] & {*known}] for name in columns}
    roles = {name: each[0] for name, each in fitting.items() if len(each) == 1}
    if len({*roles.values()}) < len(columns):
        known = "; ".join(f"{role}: {', '.join(names)}" for role, names in _NAMES.items())
        raise ArgumentError(
            f"The discriminator reads {', '.join(columns)}: which of them is the heavy chain, the light chain and the "
            f"antigen is not clear. Train it on columns with one of these words in their names ({known})."
        )
    return roles


def find_doubt(folder: str | Path) -> str | None:
    """Finds what the record of a model says against it, a clause; None where it beat every baseline on test rows."""
    try:
        verdict = read_record(RunRecord, Path(folder) / "all_results.json").verdict
    except (OSError, DataError):
        verdict = VerdictRecord()
    if not verdict.text:
        return "what it is worth is not known: no verdict of its own test is beside it"
    if verdict.outcome == "better":
        return None
    return f"its own record says: {verdict.text.splitlines()[0].rstrip('.')}"


def judge_affinities(
    predicted: FloatArray, sampling: Sampling, asked: Any = None, threshold: float = THRESHOLD
) -> dict[str, Score]:
    """Scores predictions for n outputs.

    Args:
        predicted: (n,) label units; NaN where it could not predict.
        sampling: its groups are those of these rows.
        asked: (n,) pKd that each output was asked to have; None: nothing was asked for.
        threshold: label units.

    Returns:
        share_above: outputs predicted at or above the threshold; one that cannot be predicted is not. correlation:
        Spearman between asked-for and predicted; only where something was asked for.
    """
    scores = {"share_above": mean_score(np.nan_to_num(predicted, nan=-np.inf) >= threshold, sampling)}
    if asked is None:
        return scores
    has_value = ~np.isnan(predicted)
    drawn = sampling.of_rows(has_value)
    wanted = np.asarray(asked, np.float64)[has_value]
    found = score_predictions(predicted[has_value], wanted, threshold=None, **drawn)
    return {**scores, "correlation": by_groups(found["spearman"], drawn["groups"])}
