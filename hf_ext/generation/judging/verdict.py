"""The one sentence about a generator: what is wrong with it before what is good about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...evaluation.scores import PairedComparison
from ...evaluation.verdict import find_hardest
from ...reporting.units import capitalize
from .baselines import RANDOM
from .comparison import MEASURES, Comparisons, SetScores
from .conditions import ConditionEffect
from .rows import CHAINS

MIN_OUTPUTS = 10
INVALID_BELOW = 0.5  # stage 2's gate: below, what else is measured is not of antibodies
COLLAPSED_BELOW = 0.5  # distinct outputs; a sound generator has 0.96 and more
MEMORISED_FROM = 0.5  # outputs that are training pairs
TOO_LONG_FROM = 0.1  # chains that run on past any variable domain; 0.02 of published human ones do


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
    is_failure: bool


@dataclass(frozen=True)
class GenerationVerdict:
    """What a report says first.

    Attributes:
        text: one sentence: failures of the generator, doubts about its discriminator, then what else was found.
        outcome: kind of the first failure, else of the first finding that is about the generator.
        is_better: than every baseline on the measure, with no failure; None where that is undecided.
        measure: of `MEASURES`, that decided.
    """

    text: str
    outcome: str
    is_better: bool | None
    measure: str
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def decide(
    model: SetScores, comparisons: Comparisons, effects: Sequence[ConditionEffect], measure: str
) -> GenerationVerdict:
    """Puts together what was measured.

    Args:
        model: of the outputs.
        comparisons: with each baseline, from `compare_sets`.
        effects: of the antigen, and of pKd where there is one; that of the antigen decides.
        measure: of `MEASURES`, by which baselines are beaten.
    """
    findings = [
        *_judge_size(model),
        *_judge_validity(model),
        *_judge_copies(model),
        *(Finding(one.reading, one.text, one.reading == "ignores") for one in effects if one.reading != "reads"),
        *_judge_baselines(comparisons.get(measure, {}), measure),
        *_judge_discriminator(model, comparisons),
        *(Finding("reads", one.text, False) for one in effects if one.reading == "reads"),
        *_judge_gaps(model, effects),
    ]
    failures = [one for one in findings if one.is_failure]
    ordered = sorted(findings, key=lambda one: (not one.is_failure, one.kind != "discriminator"))
    outcome = next(one.kind for one in ordered if one.kind != "discriminator")
    is_better = None if not failures and outcome != "better" else outcome == "better"
    return GenerationVerdict(
        f"{capitalize('; '.join(one.text for one in ordered))}.", outcome, is_better, measure, tuple(ordered)
    )


def _judge_size(model: SetScores) -> list[Finding]:
    num = model.diversity.num_outputs
    return [Finding("few outputs", f"only {num} outputs, which show nothing", True)] if num < MIN_OUTPUTS else []


def _judge_validity(model: SetScores) -> list[Finding]:
    validity, found = model.validity, []
    share, form = validity.decisive["value"], validity.well_formed["value"]
    if share is not None and share < INVALID_BELOW:
        by = "by numbering" if validity.strict else "by their conserved residues' pattern"
        letters = f" ({_percent(form)} pass the check of the alphabet alone)" if form and form > share else ""
        found.append(Finding("invalid", f"invalid: {_percent(share)} of outputs are antibodies {by}{letters}", True))
    for chain in CHAINS:
        too_long = validity.num_too_long[chain] / max(1, model.num_rows)
        if too_long >= TOO_LONG_FROM:
            median = validity.median_length_of_too_long[chain]
            text = (
                f"{_percent(too_long)} of {chain} chains are longer than any variable domain (median {median:.0f} "
                "residues): a constant region or a second domain is written with them"
            )
            found.append(Finding("too long", text, True))
    return found


def _judge_copies(model: SetScores) -> list[Finding]:
    diversity, memorised, found = model.diversity, model.novelty.memorised["value"], []
    share = diversity.num_distinct / max(1, diversity.num_outputs)
    if share < COLLAPSED_BELOW:
        numbers = f"{diversity.num_distinct:,} of {diversity.num_outputs:,}"
        found.append(Finding("collapsed", f"collapsed: {_percent(share)} of outputs are distinct ({numbers})", True))
    if memorised is not None and memorised >= MEMORISED_FROM:
        text = f"memorised: {_percent(memorised)} of outputs are training antibodies to the residue"
        found.append(Finding("memorised", text, True))
    return found


def _judge_baselines(compared: dict[str, PairedComparison], measure: str) -> list[Finding]:
    """Against the baseline that the model beats least surely."""
    name = MEASURES[measure]
    known = {baseline: one for baseline, one in compared.items() if one.improvement is not None}
    if not known:
        return [Finding("undecided", f"not compared with any baseline: no row has a {name}", False)]
    hardest = find_hardest(known)
    one = known[hardest]
    numbers = f"{one.after:.3f} against {one.before:.3f}, difference {_interval(one)}, {_units(one)}"
    if one.is_better:
        return [Finding("better", f"better than every baseline on {name} (hardest: {hardest}, {numbers})", False)]
    if one.improvement is not None and one.improvement <= 0:
        return [Finding("no better", f"no better than {hardest} on {name} ({numbers})", True)]
    few = "" if one.is_trusted else ", too few to claim anything"
    return [Finding("undecided", f"not shown to be better than {hardest} on {name} ({numbers}{few})", False)]


def _judge_discriminator(model: SetScores, comparisons: Comparisons) -> list[Finding]:
    if model.affinities is None:
        return []
    doubts = list(model.affinities.doubts)
    against = comparisons.get("affinity", {}).get(RANDOM)
    if against is not None and against.improvement is not None and not against.is_better:
        doubts.append(f"it does not rate these outputs above {RANDOM} (difference {_interval(against)})")
    if not doubts:
        return []
    text = f"the discriminator's scores are not to be believed: {', and '.join(doubts)}"
    return [Finding("discriminator", text.rstrip("."), False)]


def _judge_gaps(model: SetScores, effects: Sequence[ConditionEffect]) -> list[Finding]:
    found = []
    if not any(one.condition == "antigen" for one in effects):
        found.append(Finding("undecided", "whether the antigen is read was not measured", False))
    if model.validity.strict is None:
        text = "validity is by patterns of conserved residues, not by numbering (extra 'numbering')"
        found.append(Finding("unnumbered", text, False))
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _interval(one: PairedComparison) -> str:
    if one.low is None or one.high is None:
        return f"{one.improvement:.3f}, no interval"
    return f"{one.improvement:.3f} [{one.low:.3f}, {one.high:.3f}]"


def _units(one: PairedComparison) -> str:
    column = one.interval_by or "row"
    uneven = (one.num_effective_units or 0) < 0.75 * (one.num_units or 0)
    even = f", as uneven as {one.num_effective_units:.0f}" if uneven else ""
    return f"{one.num_units:,} values of {column}{even}"
