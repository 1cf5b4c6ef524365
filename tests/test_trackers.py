"""trackio and W&B without a network, run once for real: what a recipe logs is in their files."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

RUN = ["--num_train_epochs", "3", "--head", "mlp", "--output_dir", "run", "--run_name", "one"]
FILES = {"trackio": "tracked/**/*.db", "wandb": "wandb/offline-run-*/*.wandb"}


@pytest.mark.parametrize("tracker", FILES)
def test_a_tracker_holds_the_losses_of_a_run(tmp_path, tracker):
    pytest.importorskip(tracker)
    # One that asks for an account, or cannot reach its service, ends or hangs here.
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    environment = {**os.environ, **offline, "TRACKIO_DIR": str(tmp_path / "tracked")}
    command = [sys.executable, "-m", "hf_ext", "train", *RUN, "--report_to", tracker]
    streams = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=300, **streams)
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(b"train/loss" in path.read_bytes() for path in tmp_path.glob(FILES[tracker]))
    assert (tmp_path / "run" / "model.safetensors").is_file()
