"""What a model card asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ... import units
from ...markdown import plain
from ...report.run_files import RunFiles
from ...report.values import as_dict
from ...units import metric_title
from ..facts import data_source, is_demo, named_base
from ..names import is_hub_id, last_part
from ..rows import rows_section
from ..score_lines import note_lines, undefined_lines


class TaskCard(ABC):
    """What a card says of a run because of its task; the rest of the card is alike for all tasks.

    Lists of text are lines of Markdown; a section begins with its heading and ends with an empty line. Where a run
    lacks what a method needs, the line is left out or says so; nothing is raised.
    """

    heading = "What it predicts"
    tags: tuple[str, ...]  # of the Hub
    pipeline_tag: str | None = None  # of transformers; None where no pipeline of it runs the model
    index_task: tuple[str, str]  # of the model index: its type, and what it is called
    package = "`hf_ext`"  # that has to be installed
    library_name = "hf_ext"  # that loads the model, by the Hub's names
    demo_effect = "predicts"  # nothing real, where the data was a demo
    not_about = "no safety, no function in a cell, no patient"
    absent = units.NOT_MEASURED  # of a score that the model has and another predictor lacks

    def __init__(self, run: RunFiles):
        self.run = run

    @abstractmethod
    def description(self) -> list[str]:
        """What it predicts from what."""

    @abstractmethod
    def subject(self) -> str:
        """What the card is about, and about nothing else."""

    @abstractmethod
    def loading_code(self, repo: str) -> list[str]:
        """Lines of Python that load the model and run as they stand, on made-up inputs."""

    def loading_notes(self, repo: str) -> list[str]:
        """What follows the code."""
        return []

    def use_section(self) -> list[str]:
        """What the model must not be used for, where its limitations do not say enough."""
        return []

    def bases(self) -> list[dict[str, Any]]:
        """The pretrained models under this one: {"encoder", "revision", "training", "inputs"}; none for a new model."""
        towers = as_dict(self.run.results.get("model")).get("towers")
        return [dict(tower) for tower in towers] if towers else named_base(self.run)

    def contains_bases(self) -> bool:
        """Whether the folder holds the weights of pretrained models that stayed as they were."""
        return bool(self.run.settings.get("save_full"))

    def scored_split(self) -> tuple[str, dict[str, Any]]:
        """Name of the split that the card's scores are of, and predictor -> metric -> score."""
        for split in ("test", "validation"):
            scores = self._scores_in(as_dict(self.run.results.get(split)))
            if scores:
                return split, scores
        return "test", {}

    def _scores_in(self, split: dict[str, Any]) -> dict[str, Any]:
        return as_dict(split.get("scores"))

    def metric_title(self, metric: str) -> str:
        """What a score is called."""
        return metric_title(metric)

    def score_notes(self) -> list[str]:
        """What follows the table of scores."""
        split, scores = self.scored_split()
        return [*undefined_lines(scores), *note_lines(as_dict(self.run.results.get(split)))]

    def dataset(self) -> tuple[str, str]:
        """Kind and name, for the model index, of what the scores were measured on."""
        source = data_source(self.run)
        if is_demo(self.run):
            return "generated", "Generated demo data"
        return (source, source) if is_hub_id(source) else ("local-file", last_part(source))

    def data_section(self) -> list[str]:
        """Source, rows, split; nothing where they were not recorded."""
        return rows_section(self.run)

    def findings(self) -> list[str]:
        """What the verdict found wrong, or did not find out: the first of the limitations."""
        verdict = as_dict(self.run.results.get("verdict"))
        better, baseline = verdict.get("is_better"), plain(verdict.get("baseline") or "a trivial predictor")
        if better is False:
            return [f"It is not better than {baseline}: prefer that to its predictions."]
        return [] if better else [f"Whether it is better than {baseline} is not decided by this run."]

    def limits(self) -> list[str]:
        """Limitations after those of split and leaks."""
        return []

    def interval_limits(self) -> list[str]:
        """Limitations of the intervals."""
        return []
