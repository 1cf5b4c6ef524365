"""trackio and W&B without a network, run once for real: what a recipe logs is in their files."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent
RUN = ["--num_train_epochs", "3", "--head", "mlp", "--output_dir", "run", "--run_name", "one"]


def train(folder: Path, tracker: str, **variables: str) -> str:
    command = [sys.executable, str(ROOT / "recipes" / "max_speed.py"), *RUN, "--report_to", tracker]
    # A tracker that asks for an account, or cannot reach its service, ends or hangs here.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_trackio_holds_the_losses_of_the_run(tmp_path):
    pytest.importorskip("trackio")
    train(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "tracked"))
    (file,) = [path for path in (tmp_path / "tracked").rglob("*.db") if "huggingface" in path.name or path.stem]
    with sqlite3.connect(file) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        text = "".join(str(row) for table in tables for row in database.execute(f"select * from {table}"))
    assert "train/loss" in text
    assert "eval/rmse" in text or "eval/spearman" in text
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_wandb_offline_writes_a_run_that_can_be_synchronised(tmp_path):
    pytest.importorskip("wandb")
    train(tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()
    assert (tmp_path / "run" / "model.safetensors").is_file()
