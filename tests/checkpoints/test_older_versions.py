"""Checkpoints of an older version continue bit for bit: written by that version's own code, from this repository."""

import os
import subprocess
import sys
import tarfile
from io import BytesIO

import pytest
import torch
from any_version_run import KINDS
from locations import HELPERS, ROOT
from safetensors.torch import load_file

OLDER = "86c6749"  # before the trainer was taken apart


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The package as it was."""
    archive = subprocess.run(["git", "archive", OLDER, "hf_ext"], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        pytest.skip(f"no commit {OLDER} in this clone")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def run(tree, folder, kind, mode):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(HELPERS)])}
    command = [sys.executable, str(HELPERS / "any_version_run.py"), str(folder), kind, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(tree)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_an_older_version_continues_as_if_it_had_gone_on_there(kind, tmp_path, older):
    run(older, tmp_path, kind, "whole")
    run(older, tmp_path, kind, "killed")
    assert (tmp_path / "killed" / "checkpoint-4" / "manifest.json").is_file()
    run(ROOT, tmp_path, kind, "resumed")
    whole, resumed = (load_file(tmp_path / f"{mode}.safetensors") for mode in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert (tmp_path / "whole.json").read_text() == (tmp_path / "resumed.json").read_text()
