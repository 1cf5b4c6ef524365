"""Write the report and the model card of a finished run anew: report.html and README.md in its folder.

    hf-ext report --run outputs/affinity
    hf-ext report --run outputs/affinity outputs/mlm    # several runs

Reads what the run left there (all_results.json, plan.json, trainer_state.json, predictions.csv) and nothing else: no
model, no data, no network. A README.md that hf_ext did not write stays, and the card is README.hf_ext.md then. Exit
status: 0, or 1 where a folder holds no finished run.
"""

from __future__ import annotations

import argparse
import logging
import re
from importlib.resources import files
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment
from markupsafe import Markup

from ..errors import show_text
from ..files import Json, StrPath, write_text
from ..text import NOT_MEASURED, format_markdown_table, is_numeric, number
from .page import Block, Code, Figures, Points, Table, Text
from .run_files import RunFiles, hide_folders, is_hub_id, last_part, read_run
from .sections import Contents, compose, data_source, has_licence

logger = logging.getLogger(__name__)

MARK = "<!-- Written by hf_ext, and written anew by the next run. Remove this line to keep your changes. -->"
OTHER_NAME = "README.hf_ext.md"
# Drafts that PEFT and Trainer leave, with nothing of a person in them: each asks to be replaced.
_DRAFTS = ("# Model Card for Model ID", "This model card has been generated automatically according to the information")
# Ids of https://huggingface.co/metrics where there is one.
_METRIC_IDS = {"spearman": "spearmanr", "pearson": "pearsonr", "r2": "r_squared"}
_INTERVAL = re.compile(r"(\S+) (\[\S+, \S+\])")  # a score's text


def write_report(folder: StrPath) -> Path:
    """Writes `report.html` into the folder of a finished run.

    The verdict comes first, then alarms, then the numbers to remember; then results, limits, model, data, training,
    plan, costs, and how to repeat the run. The page is one file: no script, no request, figures drawn into it. Only
    numbers that the run left are shown. Absolute paths are shortened to their last part.

    Args:
        folder: holds `all_results.json`; `plan.json`, `trainer_state.json` and `predictions.csv` are used where they
            are.

    Returns:
        The path of the page.

    Raises:
        DataError: the folder holds no run, or one of these files is damaged.
        OSError: the folder cannot be written.

    Cost: two seconds, and a page of 100 kB, for 24,000 test rows.
    """
    run = read_run(folder)
    environment = Environment(autoescape=True)
    environment.filters.update(text=hide_folders, cell=_cell, classes=_classes)
    template = environment.from_string((files(__package__) / "templates/report.html").read_text(encoding="utf-8"))
    path = run.folder / "report.html"
    write_text(path, show_text(template.render(contents=compose(run)) + "\n"))
    return path


def _cell(value: object) -> str:
    text = hide_folders(number(value))
    found = _INTERVAL.fullmatch(text)
    return Markup('{} <span class="interval">{}</span>').format(*found.groups()) if found else text


def _classes(table: Table, column: int) -> Markup:
    """Chooses classes: columns of numbers stand to the right; the column of the model is the one that matters most."""
    texts = [number(row[column]) for row in table.rows]
    scores = [text.split(" [")[0] for text in texts if text not in (NOT_MEASURED, "undefined")]
    is_right = column > 0 and is_numeric(scores)
    is_main = table.headers[column] == "model"
    names = ["num"] * is_right + ["main"] * is_main
    return Markup(' class="{}"').format(" ".join(names)) if names else Markup()


# --- the card ---------------------------------------------------------------------------------------------------------


def write_card(folder: StrPath, *, repo_id: str | None = None) -> Path:
    """Writes the model card of a finished run, `README.md`, from what the run left in its folder.

    Its first line is the verdict. It says what the report says, without what is folded there, and without plan and
    costs; of the figures it has those that lie in the folder. Local paths are cut to their last part,
    and tokens are left out.

    Args:
        folder: `output_dir` of a finished run.
        repo_id: OWNER/NAME that the model is pushed to; None takes `--hub_model_id`, or leaves `USER/NAME` to be
            filled in.

    Returns:
        Path of the card. A `README.md` that somebody wrote stays, and the card is `README.hf_ext.md` beside it, which
        is never pushed; drafts of PEFT and Trainer are replaced.

    Raises:
        DataError: the folder holds no record of a run, or a damaged one.
        OSError: the folder cannot be written.

    Cost: reads a few MB; below a second.
    """
    run = read_run(folder)
    name = str(repo_id or run.record.settings.get("hub_model_id") or "")
    contents = compose(run, name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None)
    title = name.rpartition("/")[2] or run.folder.resolve().name
    card = ModelCard.from_template(
        _metadata(run, contents, title),
        template_str=(files(__package__) / "templates/card.md").read_text(encoding="utf-8"),
        title=plain(title),
        verdict=plain_line(contents.verdict),
        alarms=[plain_line(alarm) for alarm in contents.alarms],
        numbers=lay_out(Table(["", "", ""], contents.numbers)),
        sections=[
            (section.title, [text for text in map(lay_out, section.blocks) if text])
            for section in contents.sections
            if section.in_card
        ],
        has_report=(run.folder / "report.html").is_file(),
        mark=MARK,
    )
    path = run.folder / "README.md"
    if not _may_replace(path):
        path = path.with_name(OTHER_NAME)
        logger.warning("README.md in %s was not written by hf_ext and stays; the card is %s.", folder, OTHER_NAME)
    write_text(path, show_text(str(card)))
    return path


def _may_replace(path: Path) -> bool:
    if not path.is_file():
        return True
    text = path.read_text(encoding="utf-8", errors="replace")
    return MARK in text or any(draft in text for draft in _DRAFTS)


def _metadata(run: RunFiles, contents: Contents, title: str) -> ModelCardData:
    """Returns what the Hub filters and displays by. Nothing in it is guessed: what is not known is left out."""
    page = contents.page
    bases = contents.bases
    source = data_source(run)
    named = [base.encoder for base in bases if is_hub_id(base.encoder, base.revision)]
    trainings = {base.training for base in bases}
    extra: Json = {}
    if named:  # "finetune" where pretrained weights were changed; else they stay and something was added to them
        extra["base_model_relation"] = "finetune" if "full" in trainings else "adapter"
    if has_licence(run):
        extra |= {"license_name": "see-license-file", "license_link": "LICENSE"}
    on_hub = is_hub_id(source)
    settings = run.record.settings if on_hub else {}
    kind, dataset = (source, source) if on_hub else ("local-file", last_part(source))
    if page.dataset or run.record.is_demo:
        kind = "generated"
        dataset = page.dataset or "Generated demo data"
    scores = [
        EvalResult(
            task_type=page.task_type,
            task_name=page.task_name,
            dataset_type=kind,
            dataset_name=dataset,
            dataset_split=page.split,
            dataset_config=settings.get("dataset_config_name"),
            dataset_revision=settings.get("dataset_revision"),
            metric_type=_METRIC_IDS.get(metric, metric),
            metric_name=name,
            metric_value=value,
            verified=False,
        )
        for metric, name, value in page.scores
    ]
    return ModelCardData(
        library_name=page.library_name,
        license="other" if has_licence(run) else "unknown",
        base_model=list(dict.fromkeys(named)) or None,
        datasets=[source] if on_hub else None,
        pipeline_tag=page.pipeline_tag,
        tags=["hf_ext", *page.tags, *["lora"] * ("lora" in trainings), *["demo"] * run.record.is_demo],
        metrics=sorted({score.metric_type for score in scores}) or None,
        model_name=title,
        eval_results=scores or None,
        **extra,
    )


def lay_out(block: Block) -> str:
    """Formats a block in Markdown; nothing for what is folded in the report."""
    if isinstance(block, Figures):
        return f"![{block.png.removesuffix('.png')}]({block.png})" if block.png else ""
    if not isinstance(block, Text | Code) and block.fold:
        return ""
    if isinstance(block, Text):
        return plain_line(block.text)
    if isinstance(block, Points):
        return "\n".join(f"- {plain_line(point)}" for point in block.points)
    if isinstance(block, Code):
        fence = _fence(block.text, 3)
        return f"{fence}{block.language}\n{block.text}\n{fence}"
    rows = [[(code if i in block.code else plain)(number(cell)) for i, cell in enumerate(row)] for row in block.rows]
    table = format_markdown_table(rows, [plain(header) for header in block.headers])
    return f"{plain_line(block.caption)}\n\n{table}" if block.caption else table


def plain(text: object) -> str:
    """Writes text so that Markdown shows it as it is, on one line, without markup and folders of this machine."""
    text = " ".join(hide_folders(str(text)).split()).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = re.sub(r"([`*])", r"\\\1", text).replace("](", "]\\(").replace("][", "]\\[")
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def plain_line(text: object) -> str:
    """Writes as `plain` does, at the start of a line, where more characters begin headings, lists and quotes."""
    line = re.sub(r"^([#>+=~|-])", r"\\\1", plain(text))
    line = re.sub(r"^\[(?=[^]]*\]:)", r"\\[", line)
    return re.sub(r"^(\d+)([.)] )", r"\1\\\2", line)


def code(text: object) -> str:
    """Formats a code span: a name or a value, on one line; nothing for no text."""
    text = " ".join(hide_folders(str(text)).split())
    fence = _fence(text, 1)
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{room}{text}{room}{fence}" if text else ""


def _fence(text: str, shortest: int) -> str:
    return "`" * max(shortest, max((len(run) + 1 for run in re.findall("`+", text)), default=0))


def main(argv: list[str] | None = None) -> list[Path]:
    """Runs the recipe; returns the files that it wrote."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--run", nargs="+", required=True, metavar="FOLDER", help="Output folders of finished runs.")
    args = parser.parse_args(argv)
    written: list[Path] = []
    for folder in args.run:
        written += [write_report(folder), write_card(folder)]
    for path in written:
        print(show_text(f"Wrote {path}"))
    return written
