"""Everything that is said about a generator's outputs: beside baselines, what it reads, and one sentence first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ...evaluation import MIN_GROUPS, MODEL, PairedComparison, ResamplingGroups, find_hardest, places_of
from ...files import Facts, Json
from ...text import capitalize, score, share
from ..rows import AntibodyRows, Sampling, compare_means, find_problems, mean_score
from .copies import RANDOM, find_recovery, judge_copies, make_baselines
from .discriminator import THRESHOLD, Discriminator, judge_affinities

HELD_OUT = "held-out antibodies"
MAX_NAMED = 5  # kinds of faults that are listed
RECOVERY = "CDR-H3 recovery"  # in which the model is compared with each baseline
# Shares of outputs: a generator fails below the first two, from the third on. A sound one has 0.96 distinct, and more.
INVALID_BELOW = 0.5
COLLAPSED_BELOW = 0.5
MEMORISED_FROM = 0.5

Effect = Json  # see `judge_condition`


class Finding(NamedTuple):
    """A clause of the verdict, lower case; `kind` becomes the outcome where it comes first."""

    kind: str
    text: str
    is_failure: bool = False


def judge_generated(
    generated: AntibodyRows,
    training: AntibodyRows,
    held_out: AntibodyRows,
    sampling: Sampling,
    *,
    discriminator: Discriminator | None = None,
    threshold: float = THRESHOLD,
    effects: Sequence[Effect] = (),
    asked: Any = None,
    needs_light: bool = True,
) -> tuple[Json, dict[str, np.ndarray]]:
    """Judges outputs beside the baselines, on the same antigens and by the same judges.

    Args:
        generated: n outputs with the antigen that each was written for.
        training: what the model was trained on; baselines are made of it.
        held_out: binders of these antigens that training did not hold; of other antigens none is looked at.
        sampling: its groups are the antigens, or their clusters, of the n outputs; its seed also makes the baselines.
        discriminator: predicts affinities; those at or above `threshold` are counted.
        effects: from `judge_condition`, of the antigen and of pKd.
        asked: (n,) pKd that each output was asked to have; None: nothing was asked for.
        needs_light: whether a heavy chain alone is no valid output.

    Returns:
        JSON-able:
            verdict: see `decide`.
            sets: "model", each baseline and "held-out antibodies" -> `num_rows`; the score of `valid`, rows without a
                fault; `problems`, the most frequent faults with their numbers of rows; and the scores of
                `judge_copies`, `find_recovery` and `judge_affinities`.
            comparisons: baseline -> `PairedComparison` in CDR-H3 recovery, with the model as the later one.
            effects: as given.
            notes: sentences about all of it.
            doubt: about the discriminator; None: none.
        And of the outputs, row by row, (n,) each: valid, what `find_nearest` says, cdr3_recovery and, with a
        discriminator, affinity.

    Raises:
        DataError: no outputs, or groups of another number of rows.

    Cost: 0.1 s a distinct new pair against 12,000 training pairs, for the model's outputs and one baseline's.
    """
    if not len(generated):
        raise DataError("There are no outputs to judge: generate some first.")
    unit_of = dict(zip(generated.antigens, sampling.groups.group_of_row.tolist()))
    real = held_out.select([antigen in unit_of for antigen in held_out.antigens])
    groups = ResamplingGroups.of(sampling.groups.column, [unit_of[antigen] for antigen in real.antigens])
    sets: dict[str, Json] = {}
    measures: dict[str, dict[str, np.ndarray]] = {}

    def judge_set(name: str, rows: AntibodyRows) -> None:
        drawn = replace(sampling, groups=groups) if name == HELD_OUT else sampling
        problems = find_problems(rows, needs_light)
        copies, nearest = judge_copies(rows, training, drawn)
        by_row = {"valid": np.array([one is None for one in problems], dtype=bool), **nearest}
        scores = {"num_rows": len(rows), "valid": mean_score(by_row["valid"], drawn), **copies}
        scores["problems"] = Counter(filter(None, problems)).most_common(MAX_NAMED)
        if name != HELD_OUT:
            by_row["cdr3_recovery"] = find_recovery(rows, held_out, sampling.seed)
            scores["cdr3_recovery"] = mean_score(by_row["cdr3_recovery"], drawn)
        if discriminator is not None:
            by_row["affinity"] = discriminator.predict(rows)
            scores |= judge_affinities(by_row["affinity"], drawn, asked if name == MODEL else None, threshold)
        sets[name] = scores
        measures[name] = by_row

    judge_set(MODEL, generated)
    baselines = make_baselines(generated.antigens, training, sampling.seed)
    for name, rows in (*baselines.items(), (HELD_OUT, real)):
        judge_set(name, rows)
    of_model = measures[MODEL]["cdr3_recovery"]
    comparisons = {name: compare_means(measures[name]["cdr3_recovery"], of_model, sampling) for name in baselines}
    doubt = None if discriminator is None else discriminator.doubt
    return {
        "verdict": decide(sets[MODEL], comparisons, effects, doubt),
        "sets": sets,
        "comparisons": {name: one.as_dict() for name, one in comparisons.items()},
        "effects": list(effects),
        "notes": [sampling.groups.why_not_enough() or f"Intervals resample {sampling.groups.describe()}."],
        "doubt": doubt,
    }, measures[MODEL]


def find_gate_numbers(judged: Json) -> dict[str, float | None]:
    """Finds the numbers that gates compare in what `judge_generated` returned.

    None: not measured, or by a discriminator that is not to be believed.
    """
    scores = judged["sets"][MODEL]
    believed = {} if judged["doubt"] else scores
    against = judged["comparisons"][RANDOM]
    return {
        "valid": scores["valid"]["value"],
        "unique": scores["unique_pairs"]["value"],
        "share_above": believed.get("share_above", {}).get("value"),
        "correlation": believed.get("correlation", {}).get("value"),
        "beats_random": against["low"] if against["num_effective_units"] >= MIN_GROUPS else None,
    }


# --- the verdict ----------------------------------------------------------------------------------------------------


def decide(
    model: Facts, recovery: Mapping[str, PairedComparison], effects: Sequence[Effect], doubt: str | None
) -> Json:
    """Decides what a report says first: failures of the generator, doubts about its discriminator, then the rest.

    Args:
        model: scores of the outputs.
        recovery: baseline -> how the model's CDR-H3 recovery compares.
        effects: of the antigen, and of pKd where there is one.
        doubt: about the discriminator; None: none.

    Returns:
        JSON-able: `text`, one sentence; `outcome`, the kind of the first finding about the generator; `is_better`, than
        every baseline in CDR-H3 recovery, with no failure (None: undecided); `limits`, the clauses that are no praise.
    """
    findings = [*_find_faults(model)]
    findings += [Finding(one["reading"], one["text"], one["reading"] == "ignores") for one in effects]
    findings.append(_compare_with_baselines(recovery))
    if not any(one["condition"] == "antigen" for one in effects):
        findings.append(Finding("undecided", "whether the antigen is read was not measured"))
    findings.sort(key=lambda one: (not one.is_failure, one.kind == "reads"))
    outcome = findings[0].kind
    is_better = True if outcome == "better" else None
    if findings[0].is_failure:
        is_better = False
    if doubt:
        place = sum(one.is_failure for one in findings)
        findings.insert(place, Finding("doubt", f"the discriminator's scores are not to be believed: {doubt}"))
    return {
        "text": capitalize("; ".join(one.text for one in findings)) + ".",
        "outcome": outcome,
        "is_better": is_better,
        "limits": [one.text for one in findings if one.kind not in ("reads", "better")],
    }


def _find_faults(model: Facts) -> Iterator[Finding]:
    """Yields faults of the outputs by themselves."""
    valid = model["valid"]["value"]
    unique = model["unique_pairs"]["value"]
    memorised = model["memorised"]["value"]
    if valid < INVALID_BELOW:
        text = f"invalid: {share(valid)} of outputs are antibodies by their conserved residues' pattern"
        yield Finding("invalid", text, True)
    if unique < COLLAPSED_BELOW:
        yield Finding("collapsed", f"collapsed: {share(unique)} of {model['num_rows']:,} outputs are distinct", True)
    if memorised >= MEMORISED_FROM:
        text = f"memorised: {share(memorised)} of outputs are training antibodies to the residue"
        yield Finding("memorised", text, True)


def _compare_with_baselines(compared: Mapping[str, PairedComparison]) -> Finding:
    """Compares with the baseline that the model beats least surely."""
    known = {baseline: one for baseline, one in compared.items() if one.improvement is not None}
    if not known:
        return Finding("undecided", f"not compared with any baseline: no row has a {RECOVERY}")
    hardest = find_hardest(known)
    one = known[hardest]
    difference = score({"value": one.improvement, "low": one.low, "high": one.high})
    numbers = f"{one.after:.3f} against {one.before:.3f}, difference {difference}"
    numbers += f", {one.num_units or 0:,} values of {one.interval_by}"
    if one.is_better:
        return Finding("better", f"better than every baseline on {RECOVERY} (hardest: {hardest}, {numbers})")
    if (one.improvement or 0.0) <= 0:
        return Finding("no better", f"no better than {hardest} on {RECOVERY} ({numbers})", True)
    few = "" if one.is_trusted else ", too few to claim anything"
    return Finding("undecided", f"not shown to be better than {hardest} on {RECOVERY} ({numbers}{few})")


# --- does it read what it is given? ---------------------------------------------------------------------------------


def shuffle_antigens(antigens: Sequence[str], seed: int = 0, groups: Sequence[Any] | None = None) -> list[str]:
    """Gives the rows of each distinct antigen those of another one: a seeded derangement of the distinct antigens.

    Args:
        antigens: (n,).
        groups: (n,) their clusters: then the new antigen is of another cluster, since a near copy of the true antigen
            is no shuffled one; but for some where one cluster holds more than half of the distinct antigens.

    Raises:
        DataError: fewer than two distinct antigens.
    """
    group_of = dict(zip(antigens, antigens if groups is None else groups))
    if len(group_of) < 2:
        raise DataError(
            f"{len(antigens)} rows of {len(group_of)} antigen(s): two or more are needed to shuffle them. Evaluate on "
            "rows of several antigens."
        )
    generator = np.random.default_rng(seed)
    shuffled = [[*group_of][place] for place in generator.permutation(len(group_of))]
    members = places_of(group_of[one] for one in shuffled).values()
    distinct = [shuffled[place] for places in members for place in places]  # group by group
    # A step of the largest group's size leaves every group, unless that is more than half of all.
    step = min(max(map(len, members)), len(distinct) // 2)
    other = dict(zip(distinct, [*distinct[step:], *distinct[:step]]))
    return [other[one] for one in antigens]


def shuffle_affinities(affinities: Sequence[float], seed: int = 0) -> list[float]:
    """Gives each row another row's pKd, half of all rows away in their order by value.

    Raises:
        DataError: fewer than two distinct values.
    """
    values = np.asarray(affinities, dtype=np.float64)
    if len(np.unique(values)) < 2:
        raise DataError(f"{len(values)} rows with a pKd hold fewer than two distinct values: nothing can be shuffled.")
    order = np.lexsort((np.random.default_rng(seed).permutation(len(values)), values))
    shuffled = np.empty_like(values)
    shuffled[order] = values[np.roll(order, len(order) // 2)]
    return list(shuffled.tolist())


def judge_condition(
    condition: str, num_tokens: Any, true_losses: Any, shuffled_losses: Any, sampling: Sampling
) -> Effect:
    """Compares each row's loss with its true condition and with a shuffled one, paired, by what was held out.

    Args:
        condition: what was shuffled, "antigen" or "pKd".
        num_tokens: (n,) predicted tokens of each row.
        true_losses, shuffled_losses: (n,) summed loss of each row in nats, finite, in evaluation mode.
        sampling: its groups are the antigens, or their clusters, of these rows.

    Returns:
        JSON-able: `condition`; `reading`: reads, ignores (the interval does not lie above 0), or undecided (too few
        groups were drawn); `text`, a clause with its numbers; `comparison`, in which `improvement` is what the true
        condition saves, nats per token.
    """
    one = compare_means(shuffled_losses, true_losses, sampling, num_tokens)
    ends = (one.improvement, one.low, one.high)
    value, low, high = ("none" if end is None else f"{round(end, 4) + 0.0:.4f}" for end in ends)
    numbers = f"shuffling it costs {value} [{low}, {high}] nats per token"
    reading = "ignores"
    if one.is_better:
        reading = "reads"
    elif not one.is_trusted:
        reading = "undecided"
    text = f"{reading} the {condition}: {numbers}"
    if reading == "undecided":
        text = f"not known whether it reads the {condition}: too few units were held out ({one.num_units}; {numbers})"
    return {"condition": condition, "reading": reading, "text": text, "comparison": one.as_dict()}
