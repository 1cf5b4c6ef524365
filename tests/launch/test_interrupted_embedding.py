"""A signal while frozen encoders embed: status 75, whole shards, and the same command finishes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_files import FOLDER
from launches import clean_environment
from locations import ROOT

RECIPE = str(ROOT / "recipes" / "max_speed.py")
WRAPPER = [sys.executable, "-m", "hf_ext.launching"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / "cpu.yaml")]
FLAGS = ["--use_cpu", "true", "--num_train_epochs", "2", "--without", "packing"]


def shards(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.safetensors")}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "start",
    [[], [*WRAPPER, *ACCELERATE], [*WRAPPER, *TORCHRUN]],
    ids=["a script", "accelerate", "two processes"],
)
def test_embedding_that_is_interrupted_goes_on_with_the_same_command(tmp_path, start, name):
    cache = tmp_path / "cache"
    own = ["--output_dir", str(tmp_path / "run"), "--embedding_cache_dir", str(cache)]
    command = [*(start or [sys.executable]), RECIPE, *own, *FLAGS]
    environment, ends = clean_environment(), time.monotonic() + 120
    with (tmp_path / "log").open("w") as log:
        with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
            while not shards(cache):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends
                time.sleep(0.02)
            os.kill(process.pid, getattr(signal, name))
            assert process.wait(60) == 75, (tmp_path / "log").read_text()
        kept = shards(cache)
        assert not (tmp_path / "run" / "all_results.json").exists()
        assert subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0
    assert kept < shards(cache)
    assert (tmp_path / "run" / "all_results.json").exists()
