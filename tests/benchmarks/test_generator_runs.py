"""The benchmark of generators on real pairs: a run whose gates fail is written, once; one that cannot run says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.data.demo import make_demo_pairs

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "generator_runs.py"
SHORT = "--num_train_epochs 1 --num_judged 4 --num_reproduced 4 --num_epoch_samples 0 --numbering off --humanness off"


def measure(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), str(folder / "pairs.csv"), "no-encoder", str(folder / "work")]
    command += ["--only", "LSTM tiny, stage 1", "--output", str(folder / "runs.json"), "--words", SHORT, *words]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_a_run_whose_gates_fail_is_written_once_with_scores_gates_and_cost(tmp_path):
    table = make_demo_pairs().to_pandas()[:60]
    table["split_antigen"] = ["train"] * 40 + ["validation"] * 10 + ["test"] * 10
    table["antigen_cluster"] = range(60)
    table.to_csv(tmp_path / "pairs.csv", index=False)
    first = measure(tmp_path)
    assert first.returncode == 0, first.stderr
    (run,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert run["sizes"] == {"train": 40, "validation": 10, "test": 10}
    assert {gate["name"]: gate["passed"] for gate in run["gates"]}["token_loss"] is False
    assert run["effects"][0]["condition"] == "antigen"
    assert 0 <= run["sets"]["model"]["validity.well_formed"]["low"] <= 1
    assert run["sets"]["held-out antibodies"]["validity.motif"]["value"] == 1
    assert run["cpu_s"] > 0
    again = measure(tmp_path)
    assert (again.returncode, again.stdout) == (0, "")
    judged = measure(tmp_path, "--judge_again", ", as it is now")
    assert judged.returncode == 0, judged.stderr
    (first_entry, entry) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (first_entry, entry["run"]) == (run, "LSTM tiny, stage 1, as it is now")
    assert {name: entry[name] for name in ("cpu_s", "train", "sets")} == {
        name: run[name] for name in ("cpu_s", "train", "sets")
    }
    (tmp_path / "pairs.csv").write_text("antigen,heavy\nMKT,EVQ\n")
    failed = measure(tmp_path, "--seed", "7")
    assert failed.returncode == 1
    assert "light" in failed.stderr.splitlines()[-1]
    assert json.loads((tmp_path / "runs.json").read_text())["runs"] == [run, entry]
