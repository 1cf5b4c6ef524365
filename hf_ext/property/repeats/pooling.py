"""What several runs predicted for rows that they had not seen, joined: scores of all rows, and how runs differ."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from ...checkpoints import write_members
from ...data import SOURCE_ROW, FloatArray, Fold, as_dataset, read_bounds, read_columns
from ...evaluation import (
    MIN_GROUPS,
    MODEL,
    ResamplingGroups,
    RowMetrics,
    check_groups,
    check_requirements,
    collapse_report,
    judge,
    metrics_of,
    score_predictions,
)
from ...files import Json, replacing
from ...labels import LABEL, UNKNOWN, LabelKind, average
from ...reporting import (
    Leaks,
    RunRecord,
    describe_repeated,
    from_json,
    page_record,
    read_object,
    write_card,
    write_json,
    write_report,
)
from ...tasks import Run, Task
from ..measure import resolve_measure, verdict_metric
from ..results import write_test_files
from ..rows import describe_groups
from ..scoring import Compared, SplitScores, read_requirements

HELD = "held_out.parquet"  # the test rows of a run, and what it predicted for them
OWN = "held_out:"  # begins the names of columns that are no row's: the label, what was predicted, and
GROUP = f"{OWN} group"
FOLD = "fold"
OF_RUN = ("format", "task", "trainer", "model", "label_kind", "environment", "labels", "command")
OF_COMMAND = ("seed", "output_dir", "num_seeds", "require", "push_to_hub", "hub_model_id")
MAX_NOTES = 20
MAX_REPEATED = 5


class Part(NamedTuple):
    """A run: its folder in that of the command, its fold (None: rows are split as usual) and its seed."""

    folder: str
    fold: Fold | None
    seed: int

    @property
    def is_tested(self) -> bool:
        """Whether it is scored; not that of all rows."""
        return self.fold is None or self.fold.tested is not None


def save_held(folder: Path, rows: Dataset, test: SplitScores) -> None:
    """Writes what a run predicted for its test rows, probabilities too, into its folder."""
    kind = test.kind
    model = kind.read_outputs(test.outputs)
    lengths = [*map(len, model)] if kind.per_residue else []
    table = rows.remove_columns(LABEL).with_format("arrow")[:]
    for name, values in {LABEL: test.labels, MODEL: model, **test.predicted_by}.items():
        cells = [np.asarray(row).tolist() for row in kind.split_rows(values, lengths)]
        table = table.append_column(OWN + name, pa.array(cells))
    groups = np.arange(len(rows)) if test.groups is None else test.groups.group_of_row
    with replacing(folder / HELD) as draft:
        pq.write_table(table.append_column(GROUP, pa.array(groups)), draft)


def join_held(folder: Path, parts: Sequence[Part]) -> pa.Table:
    """Joins what runs predicted, of one seed, in the order of their source; with a column `fold` where there are."""
    tables = []
    for part in parts:
        table = pq.read_table(folder / part.folder / HELD)
        if part.fold and FOLD not in table.column_names:
            table = table.append_column(FOLD, pa.array([part.fold.tested] * len(table)))
        groups = [f"{part.folder} {number}" for number in table[GROUP].to_pylist()]
        tables.append(table.drop_columns(GROUP).append_column(GROUP, pa.array(groups)))
    names = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    joined = pa.concat_tables([table.select(names) for table in tables])
    return joined.take(pa.array(np.argsort(joined[SOURCE_ROW].to_numpy(), kind="stable")))


def read_values(table: pa.Table, kind: LabelKind) -> dict[str, Any]:
    """Returns the label and what was predicted, by name, as scores take them; of residues lists."""
    names = [name for name in table.column_names if name.startswith(OWN) and name != GROUP]
    cells = {name.removeprefix(OWN): table[name].to_pylist() for name in names}
    if kind.per_residue:
        return {name: [*map(np.array, rows)] for name, rows in cells.items()}
    return {name: np.array(rows) for name, rows in cells.items()}


def find_resampled(table: pa.Table, parts: Sequence[Part], named: set[str]) -> ResamplingGroups | None:
    """Finds what intervals resample: what runs held out together, else folds of a column, if enough; else rows."""
    column = parts[0].fold and parts[0].fold.column
    if len(named) == 1:
        (name,) = named
        # By name where rows have it: a group may lie in several folds. Numbers of clusters are of one run.
        return ResamplingGroups.of(name, table[name if name in table.column_names else GROUP].to_pylist())
    if column and len({part.fold for part in parts}) >= MIN_GROUPS:
        return ResamplingGroups.of(FOLD, table[FOLD].to_pylist())
    return None


def score_joined(
    run: Run, rows: Dataset, values: Mapping[str, Any], kind: LabelKind, groups: ResamplingGroups | None, leaks: Json
) -> SplitScores:
    """Scores joined rows as a run scores its test rows: verdict, intervals by group, baselines."""
    threshold = run.model_args.binder_threshold
    metrics = metrics_of(kind, threshold)
    groups = check_groups(groups, len(rows))
    labels = values[LABEL]
    predicted = {name: one for name, one in values.items() if name != LABEL}
    baselines = {name: one for name, one in predicted.items() if name != MODEL}
    compared = Compared(predicted, labels, kind, threshold, run.args.seed, groups)
    column = run.data_args.group_column
    group_names = [name for (name,) in read_columns(rows, [column])] if column and metrics.of_groups else None
    metric = verdict_metric(run.args, RowMetrics(threshold, kind=kind)) or "rmse"
    verdict = judge(labels, predicted, metric=metric, bounds=read_bounds(rows), **compared.options)
    if repeated := describe_repeated(from_json(Leaks, leaks)):
        verdict = replace(verdict, text=f"{verdict.text} But {repeated}")
    flat = [np.concatenate(one) if kind.per_residue else one for one in (predicted[MODEL], labels)]
    return SplitScores(
        predicted[MODEL],
        labels,
        verdict,
        compared.score(group_names),
        metrics.score_classes(*flat),
        {name: {} for name in baselines},
        collapse_report(predicted[MODEL], labels, kind),
        [],
        describe_groups(groups),
        groups,
        kind,
        baselines,
    )


def find_spread(values: FloatArray) -> Json:
    """Computes how scores of single models differ, (folds, seeds); nothing where one has none.

    Returns:
        `mean`; `std_folds`, of the means of folds; `std_seeds`, of seeds within folds; `std`, of one model of any seed
        and fold: the sum of both variances, the folds' less what seeds add to it. None where there is one of them.
    """
    num_folds, num_seeds = values.shape
    of_folds = float(values.mean(1).var(ddof=1)) if num_folds > 1 else None
    of_seeds = float(values.var(1, ddof=1).mean()) if num_seeds > 1 else None
    within = of_seeds or 0.0
    whole = max((of_folds or 0.0) - within / num_seeds, 0.0) + within
    variances = {"std_folds": of_folds, "std_seeds": of_seeds, "std": whole}
    found = {name: None if one is None else one**0.5 for name, one in variances.items()}
    return {"mean": float(values.mean()), **found} if np.isfinite(values).all() else {}


def add_up(found: Sequence[Any], name: str = "") -> Any:
    """Adds up counts of records of one form; texts and shares are those of the first."""
    first = found[0]
    if name == "repeated":
        return [*chain(*found)][:MAX_REPEATED]
    if isinstance(first, Mapping):
        return {key: add_up([one[key] for one in found], key) for key in first if all(key in one for one in found)}
    if isinstance(first, list):
        return [add_up(one) for one in zip(*found)]
    return sum(found) if isinstance(first, int) else first


def conclude(task: Task, run: Run, parts: Sequence[Part]) -> Json:
    """Joins finished runs: scores, predictions, report, card and the list of models; returns `all_results.json`."""
    tested = [part for part in parts if part.is_tested]
    seeds = [[part for part in tested if part.seed == seed] for seed in dict.fromkeys(part.seed for part in tested)]
    records = [read_object(run.folder / part.folder / "all_results.json") for part in tested]
    first = records[0]
    kind = from_json(RunRecord, first).kind
    resolve_measure(run.args, run.model_args.loss, kind)
    tables = [join_held(run.folder, each) for each in seeds]
    every = [read_values(table, kind) for table in tables]
    values = {name: average([one[name] for one in every]) for name in every[0] if all(name in one for one in every)}
    rows = as_dataset(tables[0].select([name for name in tables[0].column_names if not name.startswith(OWN)]))
    places = np.array([name.partition(" ")[0] for name in tables[0][GROUP].to_pylist()])
    folds = {part.fold.tested: np.flatnonzero(places == part.folder) for part in seeds[0] if part.fold}

    def score(one: Mapping[str, Any], chosen: Any = None) -> dict[str, float]:
        pair = [one[MODEL], one[LABEL]]
        if chosen is not None:
            pair = [[each[i] for i in chosen] if kind.per_residue else each[chosen] for each in pair]
        given = {"kind": kind, "threshold": run.model_args.binder_threshold, "num_resamples": 0}
        found = score_predictions(*pair, **given)
        return {name: np.nan if each["value"] is None else each["value"] for name, each in found.items()}

    single = [[score(one, chosen) for one in every] for chosen in folds.values() or [None]]
    reports = [record["data"] for record in records[:: len(seeds)]]
    leaks = add_up([report["leaks"] for report in reports])
    named = {record["test"]["interval_by"] for record in records} - {None}
    test = score_joined(run, rows, values, kind, find_resampled(tables[0], seeds[0], named), leaks)
    scores = test.to_dict()
    notes = {name: [*dict.fromkeys(chain(*(one[name] for one in reports)))] for name in ("notes", "warnings")}
    required = read_requirements(run.model_args, run.data_args, kind)
    asked = {**vars(run.args), **vars(run.model_args)}
    results = {
        **{name: first[name] for name in OF_RUN if name in first},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": run.args.seed,
        "settings": {**first["settings"], **{name: asked[name] for name in OF_COMMAND}},
        "settings_from": {name: origin for name, origin in run.parser.origins.items() if origin != "default"},
        "costs": {
            **first["costs"],
            "wall_s": None,
            "num_sessions": None,
            "train_s": sum(record["costs"]["train_s"] for record in records),
        },
        "verdict": scores["verdict"],
        "test": scores,
        "requirements": check_requirements(required, {**first["train"], **test.scores[MODEL]}),
        "data": {
            **reports[0],
            **{name: each[:MAX_NOTES] for name, each in notes.items()},
            "leaks": leaks,
            "sizes": {**reports[0]["sizes"], "test": len(rows)},
        },
        "repeats": {
            "final_model": run.model_args.final_model,
            "folds": [
                {"fold": name, "num_rows": len(chosen), "scores": score(values, chosen)}
                for name, chosen in folds.items()
            ],
            "seeds": [{"seed": each[0].seed, "scores": score(one)} for each, one in zip(seeds, every)],
            "spread": {
                name: find_spread(np.array([[one[name] for one in each] for each in single])) for name in single[0][0]
            },
        },
    }
    page = task.describe(results)
    assert page is not None
    results["page"] = page_record(page)
    members = [part.folder for part in parts if part.is_tested == (run.model_args.final_model == "mean")]
    write_members(run.folder, members)
    write_test_files(run.folder, run.data_args.label_column, test, rows, pad(test.labels), test.outputs)
    shutil.copyfile(run.folder / tested[0].folder / "plan.json", run.folder / "plan.json")
    write_json(run.folder / "all_results.json", results)
    run.log.info("\n%s\n\n%s\n", test.table(), "\n".join(": ".join(one) for one in page.numbers))
    write_report(run.folder)
    write_card(run.folder, repo_id=run.args.hub_model_id)
    run.log.info("Report: %s/report.html; the runs are in folders beside it.", run.folder)
    return results


def pad(labels: Any) -> Any:
    """Returns labels of rows as one array; of residues (n, longest), -100 behind the last of a row."""
    if not isinstance(labels, list):
        return labels
    padded = np.full((len(labels), max(map(len, labels))), UNKNOWN, labels[0].dtype)
    for row, values in zip(padded, labels):
        row[: len(values)] = values
    return padded
