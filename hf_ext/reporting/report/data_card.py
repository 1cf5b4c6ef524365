"""The data card: rows read and left out, splits, leaks, labels, lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import units
from ..charts import length_chart
from ..near_copies import count_near
from .blocks import Block, Bullets, Code, Figure, Paragraph, Table
from .columns import list_columns
from .run_files import RunFiles
from .values import as_dict, hide_folders

_AUDIT = (
    ("n", "rows", units.number),
    ("min", "lowest", units.number),
    ("max", "highest", units.number),
    ("mean", "mean", units.number),
    ("std", "deviation", units.number),
    ("num_distinct", "distinct", units.number),
    ("tied_share", "tied", units.share),
    ("censored_share", "censored", units.share),
    ("share_at_min", "at the lowest", units.share),
    ("share_at_max", "at the highest", units.share),
)


def table_blocks(run: RunFiles) -> list[Block]:
    """Of rows read from a table: what the model learned from, what was left out, what of the test it had seen."""
    data = as_dict(run.results.get("data"))
    blocks: list[Block] = [*_source_blocks(data, run), *_split_blocks(data), *_missing_blocks(data)]
    blocks += [*_leak_blocks(data), *_label_blocks(run), *_input_blocks(data)]
    chart = length_chart(run.predictions.columns, list_columns(run)) if run.predictions else None
    return [*blocks, *([Figure(chart)] if chart else [])]


def _source_blocks(data: Mapping[str, Any], run: RunFiles) -> list[Block]:
    if not data:
        return []
    source = hide_folders(str(data["source"])) if data.get("source") else "generated demo data"
    rows: list[list[object]] = [["source", source], ["revision", run.settings.get("dataset_revision")]]
    rows.append(["filter", data.get("filter")])
    if data.get("streaming"):
        text = "Rows were streamed, so they are not counted and leaks between splits are not looked for."
        return [_facts(rows), Paragraph(text)]
    rows += [
        ["rows read", units.number(data.get("rows_read"))],
        ["rows filtered out", units.number(data.get("rows_filtered_out"))],
        ["rows rejected", units.number(data.get("rows_rejected"))],
    ]
    reasons = [f"Rejected, {rule}: {units.number(count)}." for rule, count in _counts(data.get("rejected_by_rule"))]
    changes = [
        f"Column {column}: {kind} in {units.number(count)} rows."
        for column, kinds in as_dict(data.get("changes")).items()
        for kind, count in as_dict(kinds).items()
    ]
    return [_facts(rows), *([Bullets([*reasons, *changes])] if reasons or changes else [])]


def _facts(rows: list[list[object]]) -> Table:
    return Table(["", ""], [row for row in rows if row[1] is not None])


def _counts(value: Any) -> list[tuple[str, Any]]:
    return sorted(as_dict(value).items(), key=lambda item: str(item[0]))


def _split_blocks(data: Mapping[str, Any]) -> list[Block]:
    sizes = as_dict(data.get("sizes"))
    split = as_dict(data.get("split"))
    subset = as_dict(data.get("train_subset"))
    blocks: list[Block] = []
    if sizes:
        rule = str(split.get("rule") or "not recorded")
        seed = f", seed {split['seed']}" if split.get("seed") is not None else ""
        total = sum(size for size in sizes.values() if isinstance(size, int)) or 1
        rows = [[name, units.number(size), units.share(size / total)] for name, size in sizes.items()]
        blocks.append(Table(["split", "rows", "share"], rows, f"Split by: {rule}{seed}."))
    notes = [str(note) for note in [*(split.get("notes") or []), *(data.get("notes") or [])]]
    if subset:
        of = f" of {units.number(subset['of'])}" if "of" in subset else ""
        notes.append(f"Trained on a subset of {units.number(subset.get('num_rows'))}{of} training rows.")
    return [*blocks, *([Bullets(notes)] if notes else [])]


def _missing_blocks(data: Mapping[str, Any]) -> list[Block]:
    """How many rows of each split lack which chain."""
    sizes, counts = as_dict(data.get("sizes")), as_dict(data.get("missing_chains"))
    rows = [
        [f"without {column}", *(f"{units.number(num)} of {units.number(sizes.get(name))}" for name, num in of.items())]
        for column, of in ((column, as_dict(of)) for column, of in counts.items())
    ]
    if not rows:
        return []
    caption = "Chains that rows lack. The head sees the mean of the training rows that have the chain."
    return [Table(["rows", *as_dict(next(iter(counts.values())))], rows, caption)]


def _leak_blocks(data: Mapping[str, Any]) -> list[Block]:
    leaks = as_dict(data.get("leaks"))
    if not leaks:
        return [] if data.get("streaming") or not data else [Paragraph("Leaks between splits: not measured.")]
    compared = leaks.get("compared", "test")
    parts = dict(as_dict(leaks.get("columns")))
    if len(parts) > 1:
        parts["all columns together"] = as_dict(leaks.get("row"))
    identities = [near["identity"] for near in as_dict(leaks.get("row")).get("near") or []]
    rows = [
        [
            name,
            _of(leak, "num_test_rows_in_train", "num_test_rows"),
            _of(leak, "num_test_sequences_in_train", "num_test_sequences"),
            *(count_near(near, leak["num_checked"]) for near in leak.get("near") or []),
        ]
        for name, leak in ((name, as_dict(leak)) for name, leak in parts.items())
    ]
    headers = [
        "sequence",
        f"{compared} rows seen in training",
        "distinct sequences seen",
        *(f"checked rows at >= {100 * identity:.3g}% identity to training" for identity in identities),
    ]
    meaning = "Identity: 1 - edit distance / length of the longer sequence; a row is near where all columns are."
    return [Table(headers, rows, f"What of {compared} is in training, too. {meaning if identities else ''}".strip())]


def _of(leak: Mapping[str, Any], part: str, whole: str) -> str:
    return f"{units.number(leak.get(part))} of {units.number(leak.get(whole))}"


def _label_blocks(run: RunFiles) -> list[Block]:
    audits = {name: as_dict(audit) for name, audit in as_dict(run.results.get("labels")).items() if audit}
    if not audits:
        return []
    rows = [
        [name, *(show(audit.get(key)) for audit in audits.values())]
        for key, name, show in _AUDIT
        if any(key in audit for audit in audits.values())
    ]
    return [Table(["labels", *audits], rows, "Labels. Tied: rows that share their value with another.")]


def _input_blocks(data: Mapping[str, Any]) -> list[Block]:
    rows = [
        [
            Code(name),
            units.number(facts.get("longest"), "residues"),
            units.number(facts.get("num_above_limit")),
            units.share(facts.get("unknown_share")),
        ]
        for name, facts in ((name, as_dict(facts)) for name, facts in as_dict(data.get("inputs")).items())
    ]
    headers = ["encoder input", "longest", "above the encoder's limit", "unknown residues"]
    return [Table(headers, rows, "Encoder inputs over all splits.")] if rows else []
