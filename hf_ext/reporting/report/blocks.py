"""What a report consists of, before anyone decides how it looks: sections of paragraphs, tables, figures, lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..charts import Chart


class Code(str):
    """Text of a cell or an item that is shown as code: the name of an argument, a command."""


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences; `is_note` sets them smaller: how to read what stands above."""

    items: Sequence[str]
    is_note: bool = False


@dataclass(frozen=True)
class Command:
    """Lines to copy into a terminal."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells are text or numbers, None where nothing was measured; the first column names the row."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    highlight: str | None = None  # the header of the column that matters most


@dataclass(frozen=True)
class Figure:
    """A chart; `png` is a file beside the report that shows the same."""

    chart: Chart
    png: str | None = None


@dataclass(frozen=True)
class Fold:
    """Blocks that only some readers want, closed until asked for."""

    summary: str
    blocks: Sequence[Block]


Block = Paragraph | Bullets | Command | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A part of the report; `id` is what links point at."""

    id: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class KeyNumber:
    """One number at the top: what it is, its text, and what to hold it against."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report. `is_better` colours the verdict: better than every baseline, not, or None: undecided."""

    title: str
    subtitle: str
    verdict: str
    is_better: bool | None
    alarms: Sequence[str] = ()
    key_numbers: Sequence[KeyNumber] = ()
    sections: Sequence[Section] = field(default_factory=list)
    footer: str = ""
