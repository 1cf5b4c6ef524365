"""What several runs predicted for rows that they had not seen, joined: scores of all rows, and how runs differ."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from ...checkpoints import write_members
from ...data import SOURCE_ROW, FloatArray, Fold, as_dataset
from ...evaluation import (
    MIN_GROUPS,
    MODEL,
    ResamplingGroups,
    check_groups,
    check_requirements,
    score_predictions,
)
from ...files import Facts, Json, replacing
from ...labels import LABEL, UNKNOWN, LabelKind, average
from ...reporting import RunRecord, from_json, page_record, read_object, write_card, write_report
from ...tasks import Run, Task
from ...text import write_json
from ..measure import resolve_measure
from ..results import write_test_files
from ..scoring import Compared, SplitScores, read_requirements, score_rows

HELD = "held_out.parquet"  # the test rows of a run, and what it predicted for them
OWN = "held_out:"  # begins the names of columns that are no row's: the label, what was predicted, and
GROUP = f"{OWN} group"
FOLD = "fold"
OF_RUN = ("format", "task", "trainer", "model", "label_kind", "environment", "labels", "command", "settings_from")
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
    return pa.concat_tables([table.select(names) for table in tables]).sort_by(SOURCE_ROW)


def read_values(table: pa.Table, kind: LabelKind) -> dict[str, Any]:
    """Returns the label and what was predicted, by name, as batches hold them: of residues -100 behind a row's last."""
    found = {}
    for name in table.column_names:
        if name.startswith(OWN) and name != GROUP:
            rows = [*map(np.array, table[name].to_pylist())]
            if kind.per_residue:
                rows = [*pad_sequence([*map(torch.from_numpy, rows)], True, UNKNOWN).numpy()]
            found[name.removeprefix(OWN)] = np.array(rows)
    return found


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
    """Adds up numbers of records of one form, which may lack some; texts and identities are those of the first."""
    first = found[0]
    if name == "repeated":
        return [*chain(*found)][:MAX_REPEATED]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(chain(*found))
        return {key: add_up([one[key] for one in found if key in one], key) for key in keys}
    if isinstance(first, list):
        return [add_up(one) for one in zip(*found)]
    return first if isinstance(first, str) or name == "identity" else sum(found)


def conclude(task: Task, run: Run, parts: Sequence[Part]) -> Json:
    """Joins finished runs: scores, predictions, report, card and the list of models; returns `all_results.json`."""
    args = run.model_args
    tested = [part for part in parts if part.is_tested]
    seeds = [[part for part in tested if part.seed == seed] for seed in dict.fromkeys(part.seed for part in tested)]
    ended = [read_object(run.folder / part.folder / "all_results.json") for part in parts]
    records = ended[: len(tested)]  # models of all rows come last
    for one in ended[len(tested) :]:
        one["costs"]["phases"] = {"final model": add_up([*one["costs"]["phases"].values()])}
    first = records[0]
    kind = from_json(RunRecord, first).kind
    resolve_measure(run.args, args.loss, kind)
    tables = [join_held(run.folder, each) for each in seeds]
    table = tables[0]
    every = [read_values(one, kind) for one in tables]
    values = {name: average([one[name] for one in every]) for name in every[0] if all(name in one for one in every)}
    rows = as_dataset(table.select([name for name in table.column_names if not name.startswith(OWN)]))
    places = np.array([name.partition(" ")[0] for name in table[GROUP].to_pylist()])
    folds = {part.fold.tested: np.flatnonzero(places == part.folder) for part in seeds[0] if part.fold}

    def score(one: Facts, chosen: Any = slice(None)) -> dict[str, float]:
        pair = [one[name][chosen] for name in (MODEL, LABEL)]
        found = score_predictions(*pair, kind=kind, threshold=args.binder_threshold, num_resamples=0)
        return {name: np.nan if each["value"] is None else each["value"] for name, each in found.items()}

    single = [[score(one, chosen) for one in every] for chosen in folds.values() or [slice(None)]]
    reports = [record["data"] for record in records[:: len(seeds)]]
    leaks = add_up([report["leaks"] for report in reports])
    named = {record["test"]["interval_by"] for record in records} - {None}
    groups = check_groups(find_resampled(table, seeds[0], named), len(rows))
    labels = values.pop(LABEL)
    compared = Compared(values, labels, kind, args.binder_threshold, run.args.seed, groups)
    test = score_rows(compared, rows, run.args, run.data_args.group_column, leaks)
    test.baselines = {name: {} for name in test.predicted_by}
    scores = test.to_dict()
    required = read_requirements(args, run.data_args, kind)
    asked = {**vars(run.args), **vars(args)}
    results = {
        **{name: first[name] for name in OF_RUN if name in first},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": run.args.seed,
        "settings": {**first["settings"], **{name: asked[name] for name in OF_COMMAND}},
        "costs": {
            **first["costs"],
            **add_up([{name: one["costs"][name] for name in ("wall_s", "train_s", "phases")} for one in ended]),
            "num_sessions": None,
        },
        "verdict": scores["verdict"],
        "test": scores,
        "requirements": check_requirements(required, {**first["train"], **test.scores[MODEL]}),
        "data": {
            **reports[0],
            **{
                name: [*dict.fromkeys(chain(*(one[name] for one in reports)))][:MAX_NOTES]
                for name in ("notes", "warnings")
            },
            "leaks": leaks,
            "sizes": {**reports[0]["sizes"], "test": len(rows)},
        },
        "repeats": {
            "final_model": args.final_model,
            "folds": [
                {"fold": name, "num_rows": len(chosen), "scores": score({**values, LABEL: labels}, chosen)}
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
    write_members(run.folder, [part.folder for part in parts if part.is_tested == (args.final_model == "mean")])
    lengths = [len(row) for row in table[OWN + MODEL].to_pylist()] if kind.per_residue else []
    write_test_files(run.folder, run.data_args.label_column, test, rows, kind.split_rows(test.outputs, lengths))
    shutil.copyfile(run.folder / tested[0].folder / "plan.json", run.folder / "plan.json")
    write_json(run.folder / "all_results.json", results)
    run.log.info("\n%s\n\n%s\n", test.table(), "\n".join(": ".join(one) for one in page.numbers))
    write_report(run.folder)
    write_card(run.folder, repo_id=run.args.hub_model_id)
    run.log.info("Report: %s/report.html; the runs are in folders beside it.", run.folder)
    return results
