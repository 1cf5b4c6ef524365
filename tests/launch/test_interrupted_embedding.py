"""A signal while frozen encoders embed: status 75, whole shards, and the same command finishes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import clean_environment
from locations import ROOT
from safetensors.torch import load_file

RECIPE = str(ROOT / "recipes" / "max_speed.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
FLAGS = ["--use_cpu", "true", "--num_train_epochs", "2", "--without", "packing"]


def stored(folder: Path) -> set[tuple[int, ...]]:
    """What is in the cache, by key."""
    return {tuple(key) for path in folder.rglob("*.safetensors") for key in load_file(path)["keys"].tolist()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("start", [[], TORCHRUN], ids=["a script", "two processes"])
def test_embedding_that_is_interrupted_goes_on_with_the_same_command(tmp_path, start, name):
    cache = tmp_path / "cache"
    own = ["--output_dir", str(tmp_path / "run"), "--embedding_cache_dir", str(cache)]
    command = [*(start or [sys.executable]), RECIPE, *own, *FLAGS]
    statuses, ends = tmp_path / "statuses", time.monotonic() + 120
    environment = {**clean_environment(), "HF_EXT_STATUS_FILE": str(statuses)}
    with (tmp_path / "log").open("w") as log:
        with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
            while not stored(cache):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends
                time.sleep(0.02)
            os.kill(process.pid, getattr(signal, name))
            assert process.wait(60) == (1 if start else 75), (tmp_path / "log").read_text()
        assert statuses.read_text().split()[0] == "75", (tmp_path / "log").read_text()
        kept = stored(cache)
        assert not (tmp_path / "run" / "all_results.json").exists()
        assert subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0
    assert kept < stored(cache)
    assert (tmp_path / "run" / "all_results.json").exists()
