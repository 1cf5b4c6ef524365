"""`hf-ext report` as users run it: the report and the card of a finished run, written anew."""

import json

import pytest
from recipe_runs import ALONE, run

VERDICT = "No better than a constant: RMSE 2.1025 against 2.1001."
PAGES = ("report.html", "README.md")


def test_report_and_card_of_two_runs_begin_with_their_verdicts(tmp_path):
    record = {"format": 1, "task": "affinity", "verdict": {"text": VERDICT, "is_better": False}}
    for name in ("one", "two"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "all_results.json").write_text(json.dumps(record))
    done = run("report", tmp_path, "--run", "outputs/one", "outputs/two", launcher=ALONE)
    assert done.stdout.splitlines() == [f"Wrote outputs/{folder}/{name}" for folder in ("one", "two") for name in PAGES]
    for name in PAGES:
        assert VERDICT in (tmp_path / "outputs" / "two" / name).read_text()


@pytest.mark.nightly
def test_a_folder_without_a_finished_run_is_named(tmp_path):
    done = run("report", tmp_path, "--run", "outputs/nothing", launcher=ALONE, status=1)
    said = done.stderr.splitlines()[-1]  # bitsandbytes, where it is installed, may complain of a kernel before
    assert said.startswith("DataError: outputs/nothing: holds no all_results.json")
    assert "Traceback" not in done.stderr
