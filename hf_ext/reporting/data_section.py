"""What a model learned from, where that is rows of a table: rows read and left out, splits, leaks, labels, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..text import is_finite, units
from .page import Blocks, Points, Table, Text, facts_table
from .record import Audit, DataRecord, Facts, Leak, Leaks, from_json
from .run_files import RunFiles, show_source

# Rule of a split, up to its colon -> what it makes of the scores.
SPLITS = {
    "random": "The split is random over rows: the scores say how the model does on rows like those of training, not on "
    "new antibodies, antigens or families.",
    "group": "Whole groups were held out ({rule}): the scores are about new groups, of this kind of data.",
    "cluster": "Similar sequences were kept on one side of the split{limit}: the scores are about sequences unlike "
    "those of training by that measure, of this kind of data.",
    "position": "Whole positions were held out ({rule}): the scores are about substitutions at positions of this "
    "protein that no training row changes.",
    "mutations": "Rows with few substitutions train, and those with more test: the scores are about variants farther "
    "from this wild type than those of training.",
    "column": "The split came with the data ({rule}): what the scores say about new sequences depends on how it was "
    "made.",
    "files": "The split came with the data, as files: what the scores say about new sequences depends on how it was "
    "made.",
}
MAX_CLASSES = 50  # rows of a table
AUDIT = {  # of the labels of a split -> how its row is named
    "n": "rows",
    "min": "lowest",
    "max": "highest",
    "mean": "mean",
    "std": "deviation",
    "num_distinct": "distinct",
    "tied_share": "tied",
    "censored_share": "censored",
    "share_at_min": "at the lowest",
    "share_at_max": "at the highest",
}


def data_blocks(run: RunFiles) -> Blocks:
    """Returns what the model learned from, what was left out, and what of the test it had seen."""
    record = run.record
    data = record.data
    if not data:
        return [Text("Not recorded: the run has no data report.")]
    source = "generated demo data" if record.is_demo else ""
    if data.source:
        source = show_source(data.source, record.settings.get("dataset_revision"))
    counts = (("rows read", data.rows_read), ("rows rejected", data.rows_rejected))
    blocks = facts_table([("source", source), *counts])
    if data.streaming:
        blocks.append(Text("Rows were streamed, so they are not counted and leaks between splits are not looked for."))
    if data.sizes:
        seed = "" if data.split.seed is None else f", seed {data.split.seed}"
        total = sum(data.sizes.values()) or 1
        table = [[name, units.number(size), units.share(size / total)] for name, size in data.sizes.items()]
        caption = f"Split by: {data.split.rule or 'not recorded'}{seed}."
        blocks.append(Table(["split", "rows", "share"], table, caption))
    if notes := _row_notes(data):
        blocks.append(Points(notes))
    if not data.leaks and not data.streaming:
        blocks.append(Text("Leaks between splits: not measured."))
    return [*blocks, *_label_blocks(record.labels)]


def _row_notes(data: DataRecord) -> list[str]:
    """Returns what was left out, changed, missing or noted, as sentences."""
    subset = data.train_subset
    notes = [f"Rejected, {rule}: {units.number(count)}." for rule, count in sorted(data.rejected_by_rule.items())]
    for column, kinds in data.changes.items():
        notes += [f"Column {column}: {kind} in {units.number(num)} rows." for kind, num in kinds.items()]
    for line in _describe_missing(data):
        notes.append(f"{units.capitalize(line)}. The head sees the training rows' mean instead.")
    if subset:
        of = f" of {units.number(subset['of'])}" if "of" in subset else ""
        notes.append(f"Trained on a random subset of {units.number(subset.get('num_rows'))}{of} training rows.")
    return [*notes, *data.split.notes, *data.notes]


def _label_blocks(labels: Mapping[str, Audit]) -> Blocks:
    audits = {name: audit for name, audit in labels.items() if audit}
    rows = _audit_rows(audits.values())
    for column in next(iter(audits.values()), Audit()).columns:
        of_column = [audit.columns.get(column, Audit()) for audit in audits.values()]
        rows += [[f"{column}, {what}", *numbers] for what, *numbers in _audit_rows(of_column)]
    total = Counter[str]()
    for audit in audits.values():
        total.update(audit.counts)
    known = [label for label, _ in total.most_common()]
    for label in known[:MAX_CLASSES]:
        rows.append([label, *(units.number(audit.counts.get(label)) for audit in audits.values())])
    caption = "" if known else "Tied: rows that share their value with another."
    if len(known) > MAX_CLASSES:
        caption = f"The {MAX_CLASSES} most frequent of {len(known):,} classes."
    return [Table(["labels", *audits], rows, caption, fold="Labels")] if rows else []


def _audit_rows(audits: Collection[Audit]) -> list[list[Any]]:
    """Returns a row for each number that splits have."""
    return [
        [name, *((units.share if "share" in key else units.number)(audit.own.get(key)) for audit in audits)]
        for key, name in AUDIT.items()
        if any(key in audit.own for audit in audits)
    ]


def data_limits(data: DataRecord) -> list[str]:
    """Returns what split, leaks and lengths of the rows leave open; nothing of what was not recorded."""
    split = data.split
    lines = []
    if text := SPLITS.get(split.rule.partition(":")[0]):
        limit = f", down to {units.share(split.identity)} identity" if is_finite(split.identity) else ""
        lines.append(text.format(rule=split.rule, limit=limit))
    if data.streaming:
        lines.append("The data was streamed: whether test sequences were trained on too was not looked for.")
    lines += [*filter(None, [describe_repeated(data.leaks)]), *describe_near_copies(data.leaks)]
    for name, one in data.inputs.items():
        if one.longest and not one.cut and not one.windows:
            longest = units.number(one.longest)
            lines.append(f"{name}: the longest input seen has {longest} residues; longer ones are untested.")
    return [*lines, *_describe_windows(data), *_describe_unread(data)]


# --- in the log -------------------------------------------------------------------------------------------------------


def summarize_data(report: Facts) -> str:
    """Describes a data report in a few lines: rows, changes, split sizes, leaks, inputs, and its notes and warnings."""
    data = from_json(DataRecord, report)
    notes = [f"  note: {note}" for note in (*data.split.notes, *data.notes)]
    notes += [f"  WARNING: {warning}" for warning in data.warnings]
    if data.streaming:
        return "\n".join(["Data: streaming: rows are not counted, leaks between splits are not looked for.", *notes])
    lines = [
        f"Data: {data.rows_read:,} rows read, {data.rows_rejected:,} rejected; "
        + ", ".join(f"{n} {size:,}" for n, size in data.sizes.items())
    ]
    lines += [f"  {line}" for line in _describe_missing(data)]
    leaks = data.leaks
    rows = {**leaks.columns, **({"whole rows": leaks.row} if len(leaks.columns) > 1 else {})}
    known = [
        f"{leak.num_test_sequences_in_train:,} of {leak.num_test_sequences:,} {name}" for name, leak in rows.items()
    ]
    lines += [f"  test sequences that are in train, too: {', '.join(known)}"] if known else []
    lines += [f"  {line}" for line in describe_near_copies(leaks)[:1]]  # of whole rows; the report has each column
    longest = ", ".join(f"{name} {one.longest:,}" for name, one in data.inputs.items() if one.longest)
    lines += [f"  residues of the longest input: {longest}"] if longest else []
    lines += [f"  {line}" for line in _describe_windows(data)]
    return "\n".join([*lines, *(f"  WARNING: {line}" for line in _describe_unread(data)), *notes])


def _describe_missing(data: DataRecord) -> list[str]:
    """Describes how many rows lack a chain, a line for each that they may lack."""
    lines = []
    for name, counts in data.missing_chains.items():
        shown = [f"{num:,} of {units.number(data.sizes.get(split))} in {split}" for split, num in counts.items()]
        lines.append(f"rows without {name}: {', '.join(shown)}")
    return lines


def describe_inputs(inputs: Facts) -> list[str]:
    """Returns what encoders read in windows or do not see of `inputs`, from `check_inputs`, as sentences."""
    data = from_json(DataRecord, {"inputs": inputs})
    return [*_describe_windows(data), *_describe_unread(data)]


def _describe_windows(data: DataRecord) -> list[str]:
    return [f"{name}: {one.windows}" for name, one in data.inputs.items() if one.windows]


def _describe_unread(data: DataRecord) -> Iterator[str]:
    for name, one in data.inputs.items():
        if one.cut:
            yield f"{name}: {one.cut}"
        if one.unknown_share:
            yield f"{name}: {units.share(one.unknown_share)} of the residues are unknown to its tokenizer."


def describe_near_copies(leaks: Leaks) -> list[str]:
    """Returns sentences for the highest and the other identities, of rows and of each column.

    Only what was found is told; where there is nothing, the list is empty.
    """
    columns = leaks.columns if len(leaks.columns) > 1 else {}
    lines = [_sentence(leaks.row, leaks.compared, " in every column" if columns else "")]
    lines += [_sentence(leak, leaks.compared, f" in the column {name}") for name, leak in columns.items()]
    return [line for line in lines if line]


def describe_repeated(leaks: Leaks) -> str:
    """Returns the sentence that names rows which stand in train, too; "" where there are none."""
    num = leaks.row.num_test_rows_in_train
    if not num:
        return ""
    compared = leaks.compared
    whole = leaks.row.num_test_rows
    named = [f"{compared} row {here} is train row {there}" for here, there in leaks.repeated]
    if named and num > len(named):
        named.append("...")
    listed = f": {', '.join(named)}" if named else ""
    return (
        f"{num:,} of {whole:,} {compared} rows ({num / whole:.1%}) stand in train, too{listed}. On these, any score is "
        "memory."
    )


def _sentence(leak: Leak, compared: str, where: str) -> str:
    told = [near for near in leak.near if near.num_rows]
    if not told:
        return ""
    num = leak.num_checked
    of = f" (of {leak.num_test_rows:,})" if num < leak.num_test_rows else ""
    identity = f"a training sequence at >= {100 * told[0].identity:.3g}% identity{where}"
    if told[0].num_rows == num:
        return f"Every one of {num:,} checked {compared} rows{of} has {identity}."
    others = "".join(f"; {near.num_rows:,} of {num:,} at >= {100 * near.identity:.3g}%" for near in told[1:])
    return f"{told[0].num_rows:,} of {num:,} checked {compared} rows{of} have {identity}{others}."
