"""Puts a card together and writes it, without taking away one that somebody else wrote."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from huggingface_hub import ModelCard

from ...errors import show_text
from ...files import replacing
from ..markdown import plain, plain_line
from ..report.run_files import RunFiles, read_run
from ..report.values import as_dict
from .limits import limits_section
from .loading import loading_section
from .metadata import card_data
from .names import model_title, repo_name
from .scores import scores_section
from .sections import licence_section, model_section, training_section
from .tasks import card_of

logger = logging.getLogger(__name__)

MARK = "<!-- Written by hf_ext, and written anew by the next run. Remove this line to keep your changes. -->"
OTHER_NAME = "README.hf_ext.md"
# Drafts that PEFT and Trainer leave, with nothing of a person in them: each asks to be replaced.
_DRAFTS = ("# Model Card for Model ID", "This model card has been generated automatically according to the information")
_REPORTS = ("report.html", "report.md")


def write_card(folder: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Writes the model card of a finished run, `README.md`, from what the run left in its folder.

    Its first line is the verdict. Local paths are cut to their last part, tokens are left out, and links lead to the
    Hub or to files of the folder; so it comes after the report, which it links.

    Args:
        folder: `output_dir` of a run of `recipes/max_speed.py`, `mlm.py`, `generate_antibody.py` or `pde_operator.py`.
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
    card = ModelCard(show_text(render_card(run, repo_id)))
    path = run.folder / "README.md"
    if not _may_replace(path):
        path = path.with_name(OTHER_NAME)
        logger.warning("README.md in %s was not written by hf_ext and stays; the card is %s.", folder, OTHER_NAME)
    with replacing(path) as draft:
        card.save(draft)
    return path


def render_card(run: RunFiles, repo_id: str | None = None) -> str:
    """The text of the card, YAML block included."""
    task, title, repo = card_of(run), model_title(run, repo_id), repo_name(run, repo_id)
    verdict = as_dict(run.results.get("verdict")).get("text") or "This run compared the model with nothing."
    reports = [name for name in _REPORTS if (run.folder / name).is_file()]
    lines = [
        "---",
        card_data(task, title).to_yaml(),
        "---",
        "",
        f"# {plain(title)}",
        "",
        plain_line(verdict),
        "",
        *model_section(task),
        *task.use_section(),
        *scores_section(task),
        *([f"How it got there: {' and '.join(f'[{name}]({name})' for name in reports)}.", ""] if reports else []),
        *loading_section(task, repo),
        *limits_section(task),
        *task.data_section(),
        *training_section(run),
        *licence_section(task),
        MARK,
        "",
    ]
    return "\n".join(lines)


def _may_replace(path: Path) -> bool:
    if not path.is_file():
        return True
    text = path.read_text(encoding="utf-8", errors="replace")
    return MARK in text or any(draft in text for draft in _DRAFTS)
