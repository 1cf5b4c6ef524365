"""What a model learned from, where that is rows of a table: rows read and left out, splits, leaks, labels, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..text import units
from ..text.units import is_finite
from .page import Block, Points, Table, Text, facts_table
from .run_files import RunFiles, as_dict, is_demo, show_source

# Rule of a split, up to its colon -> what it makes of the scores.
SPLITS = {
    "random": "The split is random over rows: the scores say how the model does on rows like those of training, not on "
    "new antibodies, antigens or families.",
    "group": "Whole groups were held out ({rule}): the scores are about new groups, of this kind of data.",
    "cluster": "Similar sequences were kept on one side of the split{limit}: the scores are about sequences unlike "
    "those of training by that measure, of this kind of data.",
    "column": "The split came with the data ({rule}): what the scores say about new sequences depends on how it was "
    "made.",
    "files": "The split came with the data, as files: what the scores say about new sequences depends on how it was "
    "made.",
}
MAX_CLASSES = 50  # rows of a table
AUDIT = {
    "n": ("rows", units.number),
    "min": ("lowest", units.number),
    "max": ("highest", units.number),
    "mean": ("mean", units.number),
    "std": ("deviation", units.number),
    "num_distinct": ("distinct", units.number),
    "tied_share": ("tied", units.share),
    "censored_share": ("censored", units.share),
    "share_at_min": ("at the lowest", units.share),
    "share_at_max": ("at the highest", units.share),
}


def data_blocks(run: RunFiles) -> list[Block]:
    """What the model learned from, what was left out, and what of the test it had seen."""
    data = as_dict(run.results.get("data"))
    if not data:
        return [Text("Not recorded: the run has no data report.")]
    source = "generated demo data" if is_demo(run.results) else ""
    if data.get("source"):
        source = show_source(data["source"], run.settings.get("dataset_revision"))
    counts = [[name.replace("_", " "), data.get(name)] for name in ("rows_read", "rows_rejected")]
    blocks = facts_table([["source", source], *counts])
    if data.get("streaming"):
        blocks.append(Text("Rows were streamed, so they are not counted and leaks between splits are not looked for."))
    split, sizes = as_dict(data.get("split")), as_dict(data.get("sizes"))
    if sizes:
        seed = f", seed {split['seed']}" if split.get("seed") is not None else ""
        total = sum(size for size in sizes.values() if isinstance(size, int)) or 1
        table = [[name, units.number(size), units.share(size / total)] for name, size in sizes.items()]
        caption = f"Split by: {split.get('rule') or 'not recorded'}{seed}."
        blocks.append(Table(["split", "rows", "share"], table, caption))
    if notes := _row_notes(data):
        blocks.append(Points(notes))
    if not data.get("leaks") and not data.get("streaming"):
        blocks.append(Text("Leaks between splits: not measured."))
    return [*blocks, *_label_blocks(run)]


def _row_notes(data: Mapping[str, Any]) -> list[str]:
    """What was left out, changed, missing or noted, as sentences."""
    subset = as_dict(data.get("train_subset"))
    split_notes = as_dict(data.get("split")).get("notes") or []
    rejected = as_dict(data.get("rejected_by_rule"))
    notes = [f"Rejected, {rule}: {units.number(count)}." for rule, count in sorted(rejected.items())]
    for column, kinds in as_dict(data.get("changes")).items():
        notes += [f"Column {column}: {kind} in {units.number(num)} rows." for kind, num in as_dict(kinds).items()]
    for line in _describe_missing(data):
        notes.append(f"{units.capitalize(line)}. The head sees the training rows' mean instead.")
    if subset:
        of = f" of {units.number(subset['of'])}" if "of" in subset else ""
        notes.append(f"Trained on a random subset of {units.number(subset.get('num_rows'))}{of} training rows.")
    return [*notes, *map(str, split_notes), *map(str, data.get("notes") or [])]


def _label_blocks(run: RunFiles) -> list[Block]:
    audits = {name: as_dict(audit) for name, audit in as_dict(run.results.get("labels")).items() if audit}
    rows = _audit_rows(audits)
    for column in as_dict(next(iter(audits.values()), {}).get("columns")):
        parts = {name: as_dict(as_dict(audit.get("columns")).get(column)) for name, audit in audits.items()}
        rows += [[f"{column}, {what}", *numbers] for what, *numbers in _audit_rows(parts)]
    counts = {name: as_dict(audit.get("counts")) for name, audit in audits.items()}
    total = Counter[str]()
    for each in counts.values():
        total.update(each)
    known = [label for label, _ in total.most_common()]
    rows += [[label, *(units.number(each.get(label)) for each in counts.values())] for label in known[:MAX_CLASSES]]
    caption = "" if known else "Tied: rows that share their value with another."
    if len(known) > MAX_CLASSES:
        caption = f"The {MAX_CLASSES} most frequent of {len(known):,} classes."
    return [Table(["labels", *audits], rows, caption, fold="Labels")] if rows else []


def _audit_rows(audits: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """A row for each number that splits have."""
    return [
        [name, *(show(audit.get(key)) for audit in audits.values())]
        for key, (name, show) in AUDIT.items()
        if any(key in audit for audit in audits.values())
    ]


def data_limits(run: RunFiles) -> list[str]:
    """What split, leaks and lengths of the rows leave open; nothing of what was not recorded."""
    data = as_dict(run.results.get("data"))
    split, leaks = as_dict(data.get("split")), as_dict(data.get("leaks"))
    rule, identity = str(split.get("rule") or ""), split.get("identity")
    lines = []
    if text := SPLITS.get(rule.partition(":")[0]):
        limit = f", down to {units.share(identity)} identity" if is_finite(identity) else ""
        lines.append(text.format(rule=rule, limit=limit))
    if data.get("streaming"):
        lines.append("The data was streamed: whether test sequences were trained on too was not looked for.")
    lines += [*filter(None, [describe_repeated(leaks)]), *describe_near_copies(leaks)]
    inputs = as_dict(data.get("inputs"))
    for name, facts in inputs.items():
        if facts.get("longest") and not facts.get("cut"):
            longest = units.number(facts["longest"])
            lines.append(f"{name}: the longest input seen has {longest} residues; longer ones are untested.")
    return [*lines, *describe_unread(inputs)]


# --- in the log -------------------------------------------------------------------------------------------------------


def summarize_data(report: Mapping[str, Any]) -> str:
    """A data report in a few lines: rows, changes, split sizes, leaks, inputs, and what its notes and warnings say."""
    notes = [f"  note: {note}" for note in (*report.get("split", {}).get("notes", ()), *report.get("notes", ()))]
    notes += [f"  WARNING: {warning}" for warning in report.get("warnings", ())]
    if report.get("streaming"):
        return "\n".join(["Data: streaming: rows are not counted, leaks between splits are not looked for.", *notes])
    lines = [
        f"Data: {report['rows_read']:,} rows read, {report['rows_rejected']:,} rejected; "
        + ", ".join(f"{n} {size:,}" for n, size in report["sizes"].items())
    ]
    lines += [f"  {line}" for line in _describe_missing(report)]
    leaks = report.get("leaks") or {"columns": {}}
    rows = {**leaks["columns"], **({"whole rows": leaks["row"]} if len(leaks["columns"]) > 1 else {})}
    both = ("num_test_sequences_in_train", "num_test_sequences")
    known = [f"{leak[both[0]]:,} of {leak[both[1]]:,} {name}" for name, leak in rows.items()]
    lines += [f"  test sequences that are in train, too: {', '.join(known)}"] if known else []
    lines += [f"  {line}" for line in describe_near_copies(leaks)[:1]]  # of whole rows; the report has each column
    inputs = report.get("inputs", {})
    longest = ", ".join(f"{name} {facts['longest']:,}" for name, facts in inputs.items())
    lines += [f"  residues of the longest input: {longest}"] if inputs else []
    return "\n".join([*lines, *(f"  WARNING: {line}" for line in describe_unread(inputs)), *notes])


def _describe_missing(data: Mapping[str, Any]) -> list[str]:
    """How many rows lack a chain, a line for each that they may lack."""
    lines, sizes = [], as_dict(data.get("sizes"))
    for name, counts in as_dict(data.get("missing_chains")).items():
        shown = [f"{num:,} of {units.number(sizes.get(part))} in {part}" for part, num in counts.items()]
        lines.append(f"rows without {name}: {', '.join(shown)}")
    return lines


def describe_unread(inputs: Mapping[str, Any]) -> Iterator[str]:
    """What encoders do not see of their inputs, as sentences; `inputs` as `check_inputs` gives."""
    for name, facts in inputs.items():
        if cut := facts.get("cut"):
            yield f"{name}: {cut}"
        if share := facts.get("unknown_share"):
            yield f"{name}: {units.share(share)} of the residues are unknown to its tokenizer."


def describe_near_copies(leaks: Mapping[str, Any] | None) -> list[str]:
    """Sentences for the highest and the other identities, of rows and of each column; `leaks` as `leak_report` gives.

    Only what was found is told; where there is nothing, the list is empty.
    """
    if not leaks or not leaks.get("row"):
        return []
    compared, columns = leaks.get("compared", "test"), leaks.get("columns", {})
    if len(columns) < 2:
        lines = [_sentence(leaks["row"], compared, "")]
    else:
        lines = [_sentence(leaks["row"], compared, " in every column")]
        lines += [_sentence(leak, compared, f" in the column {name}") for name, leak in columns.items()]
    return [line for line in lines if line]


def describe_repeated(leaks: Mapping[str, Any] | None) -> str:
    """The sentence that names rows which stand in train, too; "" where there are none."""
    row = (leaks or {}).get("row") or {}
    num = row.get("num_test_rows_in_train", 0)
    if not leaks or not num:
        return ""
    compared, whole = leaks.get("compared", "test"), row["num_test_rows"]
    named = [f"{compared} row {here} is train row {there}" for here, there in leaks.get("repeated") or []]
    listed = f": {', '.join(named)}{', ...' if num > len(named) else ''}" if named else ""
    return (
        f"{num:,} of {whole:,} {compared} rows ({num / whole:.1%}) stand in train, too{listed}. On these, any score is "
        "memory."
    )


def count_near(near: Mapping[str, Any], num_checked: int) -> str:
    """As "1,234 of 2,000"."""
    return f"{near['num_rows']:,} of {num_checked:,}"


def _sentence(leak: Mapping[str, Any], compared: str, where: str) -> str:
    told = [near for near in leak.get("near") or [] if near["num_rows"]]
    if not told:
        return ""
    num_checked, num_rows = leak["num_checked"], leak["num_test_rows"]
    of = f" (of {num_rows:,})" if num_checked < num_rows else ""
    identity = f"a training sequence at >= {100 * told[0]['identity']:.3g}% identity{where}"
    if told[0]["num_rows"] == num_checked:
        return f"Every one of {num_checked:,} checked {compared} rows{of} has {identity}."
    others = "".join(f"; {count_near(near, num_checked)} at >= {100 * near['identity']:.3g}%" for near in told[1:])
    return f"{count_near(told[0], num_checked)} checked {compared} rows{of} have {identity}{others}."
