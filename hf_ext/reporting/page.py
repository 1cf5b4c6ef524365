"""What is special to a run's task, as data: a run writes it into `all_results.json`, report and card lay it out.

Everything in it is plain text: what a user named can be no markup, because nothing here is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_type_hints

from ..errors import DataError
from ..files import Facts, Json
from ..text import NOT_MEASURED
from .charts import Chart
from .record import Frozen, read_items

FORMAT = 1  # of what `page_record` returns
PLACEHOLDER = "USER/NAME"  # in code that loads a model, where its repository or folder stands


class Text(Frozen):
    """A paragraph."""

    text: str
    kind: str = "text"


class Points(Frozen):
    """A list of sentences. With `fold`, what stands on its lid, it is closed in the report and not in the card."""

    points: Sequence[str]
    fold: str = ""
    kind: str = "points"


class Code(Frozen):
    """Lines to copy."""

    text: str
    language: str = "bash"
    kind: str = "code"


class Table(Frozen):
    """Cells are text or numbers, None where nothing was measured; the first column names the row.

    Attributes:
        headers: one per column; all empty: no head.
        code: numbers of the columns that hold code: names of arguments, sequences.
        fold: as of `Points`.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    code: Sequence[int] = ()
    fold: str = ""
    kind: str = "table"


class Figures(Frozen):
    """Charts side by side in the report; the card shows `png`, a file of the folder, where there is one.

    A run's record holds none.
    """

    charts: Sequence[Chart]
    png: str = ""
    kind: str = "figures"


Block = Text | Points | Code | Table | Figures
Blocks = list[Block]
_RECORDED: dict[str, type[Any]] = {"text": Text, "points": Points, "code": Code, "table": Table}


def facts_table(rows: Sequence[Sequence[Any]], caption: str = "") -> Blocks:
    """Returns a table of two columns, without what was not recorded; nothing where nothing was."""
    known = [row for row in rows if row[1] not in (None, "", NOT_MEASURED)]
    return [Table(["", ""], known, caption)] if known else []


class Page(Frozen):
    """What a task says of one of its runs.

    Attributes:
        title: what the model does, as a heading.
        summary: the same in sentences: what it predicts from what.
        numbers: scores to remember: what it is, its text, what to hold it against.
        alarms: what weighs more than what every run is watched for.
        results: how good the model is, and compared with what.
        training: what is to be known of how it was trained, beside what every run records.
        data: what it learned from; None: rows of a table, of which every run records the same.
        limits: what a reader must know before using the model, the most serious first.
        subject: what the scores are about, and about nothing else: the end of a sentence.
        use: what the model must not be used for, where its limits do not say enough.
        loading: how to load it; `PLACEHOLDER` in it becomes the name of the repository.
        bases: the pretrained models under it, with the keys of `hf_ext.reporting.record.Base`.
        needs_bases: whether frozen ones among them are not in the folder, and have to be loaded beside it.
        scores: metric, its title and value, for the model index of the Hub.
        split: of which split these are.
        dataset: what it was scored on, for the model index; empty: where the rows were read from.
        tags, pipeline_tag, library_name, task_type, task_name: for the Hub.
    """

    title: str
    summary: str = ""
    numbers: Sequence[Sequence[str]] = ()
    alarms: Sequence[str] = ()
    results: Sequence[Block] = ()
    training: Sequence[Block] = ()
    data: Sequence[Block] | None = None
    limits: Sequence[str] = ()
    subject: str = ""
    use: Sequence[str] = ()
    loading: Sequence[Block] = ()
    bases: Sequence[Facts] = ()
    needs_bases: bool = False
    scores: Sequence[Sequence[Any]] = ()
    split: str = "test"
    dataset: str = ""
    tags: Sequence[str] = ()
    pipeline_tag: str | None = None
    library_name: str | None = None
    task_type: str = "other"
    task_name: str = "Other"


def page_record(page: Page) -> Json:
    """Returns a JSON-able record, with its format number."""
    return {"format": FORMAT, **asdict(page)}


def read_page(record: Facts) -> Page:
    """Reads the page of such a record.

    Raises:
        DataError: it is none, as after an edit by hand.
    """
    try:
        values = {name: value for name, value in record.items() if name != "format"}
        blocks = {name: values.pop(name) for name in ("results", "training", "data", "loading") if values.get(name)}
        for name, recorded in blocks.items():
            blocks[name] = [_RECORDED[block["kind"]](**block) for block in recorded]
        return Page(**read_items(get_type_hints(Page), values, "all_results.json, page"), **blocks)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"all_results.json: its entry 'page' is damaged ({error!r}). Remove the entry, and the pages say what the "
            "others hold."
        ) from error
