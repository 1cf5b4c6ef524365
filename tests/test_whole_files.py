"""Files that are written anew are whole or not there, and other names of the old ones keep what they had."""

import os
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.affinity.results import write_predictions
from hf_ext.data.collators import SequenceCollator
from hf_ext.hardware import detect_hardware
from hf_ext.plan import Plan
from hf_ext.reporting import plot_loss
from hf_ext.reporting.report import write_report
from hf_ext.reporting.run_record import write_json
from hf_ext.whole_files import replacing, write_text


def report(path: Path) -> None:
    write_json(path.parent / "all_results.json", {"format": 1, "task": "affinity"})
    write_report(path.parent)


WRITERS = {
    "plan.json": lambda path: Plan(detect_hardware("cpu"), []).save(path.parent),
    "inputs.json": lambda path: SequenceCollator({}, {}).save_pretrained(path.parent),
    "predictions.csv": lambda path: write_predictions(path, Dataset.from_dict({"a": ["M"]}), np.array([1.0])),
    "loss.png": lambda path: plot_loss([{"loss": 1.0, "step": 1}], path),
    "all_results.json": lambda path: write_json(path, {}),
    "report.html": report,
    "report.md": report,
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_leave_a_backup_of_hard_links_as_it_was(name, tmp_path):
    path, backup = tmp_path / "run" / name, tmp_path / name
    path.parent.mkdir()
    path.write_text("before")
    os.link(path, backup)
    WRITERS[name](path)
    assert backup.read_text() == "before"
    assert path.read_bytes() != b"before"
    assert not list(path.parent.glob(".*"))


def test_a_draft_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "before")
    with pytest.raises(ZeroDivisionError), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        1 / 0  # noqa: B018
    assert os.listdir(tmp_path) == ["a.txt"]
    assert path.read_text() == "before"
