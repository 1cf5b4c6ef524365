"""The one sentence about a generator: what is wrong with it before what is good about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...evaluation.paired import PairedComparison
from ...evaluation.scores import Score
from ...evaluation.verdict import describe_difference, find_hardest
from ...reporting.units import capitalize, share
from .baselines import RANDOM
from .conditions import ConditionEffect
from .rows import CHAINS

CDR3, RECOVERY = "cdr3", "CDR-H3 recovery"  # by which baselines are beaten
MEASURES = (CDR3, "heavy", "light", "valid", "humanness", "affinity")  # of a row, more is better
MIN_OUTPUTS = 10
INVALID_BELOW = 0.5  # stage 2's gate: below, what else is measured is not of antibodies
COLLAPSED_BELOW = 0.5  # distinct outputs; a sound generator has 0.96 and more
MEMORISED_FROM = 0.5  # outputs that are training pairs
TOO_LONG_FROM = 0.1  # chains that run on past any variable domain; 0.02 of published human ones do

Comparisons = Mapping[str, Mapping[str, PairedComparison]]  # measure -> baseline -> the model beside it


@dataclass(frozen=True)
class SetScores:
    """What was measured of one set of antibodies: the model's, a baseline's, or those that were held out.

    Attributes:
        num_rows: antibodies.
        scores: JSON-able, what `judge_validity`, `judge_diversity`, `judge_novelty` and `judge_affinities` say as
            "validity", "diversity", "novelty" and "affinities"; means as "recovery" and "humanness". None: not asked.
        measures: (n,) row by row: those of `MEASURES`, "nearest_heavy" and "is_copy"; all sets but the held-out one
            have the same rows.
    """

    num_rows: int
    scores: dict[str, Any]
    measures: dict[str, np.ndarray]

    @property
    def valid(self) -> Score:
        """The strictest share that was measured."""
        return self.scores["validity"]["strict"] or self.scores["validity"]["motif"]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; without what is row by row."""
        return {"num_rows": self.num_rows, **self.scores}


@dataclass(frozen=True)
class Finding:
    """One clause of the verdict.

    Attributes:
        kind: invalid, too long, collapsed, memorised, ignores, undecided, no better, better, reads, discriminator,
            unnumbered or few outputs.
        text: with its numbers, lower case.
        is_failure: whether the generator fails by it.
    """

    kind: str
    text: str
    is_failure: bool = False


@dataclass(frozen=True)
class GenerationVerdict:
    """What a report says first.

    Attributes:
        text: one sentence: failures of the generator, doubts about its discriminator, then what else was found.
        outcome: kind of the first failure, else of the first finding that is about the generator.
        is_better: than every baseline in CDR-H3 recovery, with no failure; None where that is undecided.
    """

    text: str
    outcome: str
    is_better: bool | None
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def decide(model: SetScores, comparisons: Comparisons, effects: Sequence[ConditionEffect]) -> GenerationVerdict:
    """Puts together what was measured.

    Args:
        model: of the outputs.
        comparisons: with each baseline.
        effects: of the antigen, and of pKd where there is one.
    """
    findings = [*_find_faults(model)]
    findings += [Finding(one.reading, one.text, one.reading == "ignores") for one in effects if one.reading != "reads"]
    findings.append(_compare_with_baselines(comparisons.get(CDR3, {})))
    findings += _doubt_discriminator(model, comparisons)
    findings += [Finding("reads", one.text) for one in effects if one.reading == "reads"]
    if not any(one.condition == "antigen" for one in effects):
        findings.append(Finding("undecided", "whether the antigen is read was not measured"))
    if model.scores["validity"]["strict"] is None:
        text = "validity is by patterns of conserved residues, not by numbering (extra 'numbering')"
        findings.append(Finding("unnumbered", text))
    ordered = sorted(findings, key=lambda one: (not one.is_failure, one.kind != "discriminator"))
    outcome = next(one.kind for one in ordered if one.kind != "discriminator")
    is_better = True if outcome == "better" else False if ordered[0].is_failure else None
    text = capitalize("; ".join(one.text for one in ordered))
    return GenerationVerdict(f"{text}.", outcome, is_better, tuple(ordered))


def _find_faults(model: SetScores) -> Iterator[Finding]:
    """Of the outputs by themselves."""
    num, validity, num_distinct = model.num_rows, model.scores["validity"], model.scores["diversity"]["num_distinct"]
    valid, form = model.valid["value"] or 0.0, validity["well_formed"]["value"]
    if num < MIN_OUTPUTS:
        yield Finding("few outputs", f"only {num} outputs, which show nothing", True)
    if valid < INVALID_BELOW:
        by = "by numbering" if validity["strict"] else "by their conserved residues' pattern"
        letters = f" ({share(form)} pass the check of the alphabet alone)" if form > valid else ""
        yield Finding("invalid", f"invalid: {share(valid)} of outputs are antibodies {by}{letters}", True)
    for chain in CHAINS:
        too_long = validity["num_too_long"][chain] / num
        if too_long >= TOO_LONG_FROM:
            text = (
                f"{share(too_long)} of {chain} chains are longer than any variable domain "
                f"(median {validity['median_length_of_too_long'][chain]:.0f} residues): a constant region or a second "
                "domain is written with them"
            )
            yield Finding("too long", text, True)
    if num_distinct < COLLAPSED_BELOW * num:
        text = f"collapsed: {share(num_distinct / num)} of outputs are distinct ({num_distinct:,} of {num:,})"
        yield Finding("collapsed", text, True)
    if (memorised := model.scores["novelty"]["memorised"]["value"]) >= MEMORISED_FROM:
        text = f"memorised: {share(memorised)} of outputs are training antibodies to the residue"
        yield Finding("memorised", text, True)


def _compare_with_baselines(compared: Mapping[str, PairedComparison]) -> Finding:
    """With the baseline that the model beats least surely."""
    known = {baseline: one for baseline, one in compared.items() if one.improvement is not None}
    if not known:
        return Finding("undecided", f"not compared with any baseline: no row has a {RECOVERY}")
    hardest = find_hardest(known)
    one = known[hardest]
    num, effective = one.num_units or 0, one.num_effective_units or 0.0
    uneven = f", as uneven as {effective:.0f}" if effective < 0.75 * num else ""
    numbers = f"{one.after:.3f} against {one.before:.3f}, difference {describe_difference(one)}"
    numbers += f", {num:,} values of {one.interval_by}{uneven}"
    if one.is_better:
        return Finding("better", f"better than every baseline on {RECOVERY} (hardest: {hardest}, {numbers})")
    if (one.improvement or 0.0) <= 0:
        return Finding("no better", f"no better than {hardest} on {RECOVERY} ({numbers})", True)
    few = "" if one.is_trusted else ", too few to claim anything"
    return Finding("undecided", f"not shown to be better than {hardest} on {RECOVERY} ({numbers}{few})")


def _doubt_discriminator(model: SetScores, comparisons: Comparisons) -> list[Finding]:
    doubts = [*(model.scores["affinities"] or {}).get("doubts", [])]
    against = comparisons.get("affinity", {}).get(RANDOM)
    if against is not None and against.improvement is not None and not against.is_better:
        doubts.append(f"it does not rate these outputs above {RANDOM} (difference {describe_difference(against)})")
    text = f"the discriminator's scores are not to be believed: {', and '.join(doubts)}"
    return [Finding("discriminator", text.rstrip("."))] if doubts else []
