"""What a card says of rows that were read from a table, or generated in their place."""

from __future__ import annotations

from urllib.parse import quote

from .. import units
from ..markdown import code, plain
from ..report.run_files import RunFiles
from ..report.values import as_dict
from .facts import data_source, is_demo
from .names import is_hub_id, last_part


def rows_section(run: RunFiles) -> list[str]:
    """Markdown: source, rows, split."""
    data = as_dict(run.results.get("data"))
    if not data:
        return []
    lines = ["## Data", "", f"Source: {_source(run)}."]
    if data.get("streaming"):
        return [*lines, "It was streamed, so rows were not counted.", ""]
    sizes = ", ".join(f"{name} {size:,}" for name, size in as_dict(data.get("sizes")).items())
    lines.append(
        f"{units.number(data.get('rows_read'))} rows read, {units.number(data.get('rows_filtered_out'))} filtered "
        f"out, {units.number(data.get('rows_rejected'))} rejected as unusable; {sizes} rows."
    )
    if data.get("filter"):
        lines.append(f"Filter: {code(data['filter'])}.")
    rule = as_dict(data.get("split")).get("rule")
    lines += [f"Split: {plain(rule)}, seed {as_dict(data.get('split')).get('seed', 'not recorded')}."] if rule else []
    subset = as_dict(data.get("train_subset"))
    lines += (
        [f"Trained on a random subset of {subset['num_rows']:,} of its {subset['of']:,} rows."]
        if "of" in subset
        else []
    )
    return [*lines, ""]


def _source(run: RunFiles) -> str:
    name = data_source(run)
    if is_demo(run):
        return "generated demo data"
    if not is_hub_id(name):
        return f"{code(last_part(name))}, a local file or folder"
    revision = run.settings.get("dataset_revision")
    link = f"[{plain(name)}](https://huggingface.co/datasets/{quote(name)})"
    return link + (f" at {code(revision)}" if revision else ", without a fixed revision")
