"""recipes/resume_check.py as users run it: a .pth is converted, looked at, gone on from; a hostile one is refused."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from miniature_esm import make_esm

from hf_ext.errors import ArgumentError

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "resume_check.py"


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return exec, ("open('canary', 'w').close()",)


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(RECIPE), *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With `base`, a small model, and `best_model.pth`, what a script of one's own saved of it."""
    folder = tmp_path_factory.mktemp("old")
    model = make_esm()
    model.save_pretrained(folder / "base")
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "contact_head" not in n], lr=1e-4)
    ids = torch.arange(4, 12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights = {f"module.net.{name}": tensor for name, tensor in model.state_dict().items()}
    old = {"epoch": 2, "model_state_dict": weights, "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**old, "best_spearman": 0.41}, folder / "best_model.pth")
    torch.save({**old, "args": Payload()}, folder / "hostile.pth")
    return folder


@pytest.mark.nightly
def test_an_old_file_is_converted_and_the_folder_can_be_continued(folder) -> None:
    model = ["--model", "base", "--output_dir", "new", "--rename", "net.="]
    done = run(folder, "--convert", "best_model.pth", *model)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensors are now a EsmForMaskedLM in new, checked by name, shape and bits." in done.stdout
    assert "best_spearman: 0.41" in done.stdout
    assert "--output_dir new --resume auto goes on from step 1 with its learning rate of 0.0001" in done.stdout

    done = run(folder, "new", "--arguments", "--json", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--resume auto continues from checkpoint-1 (step 1, epoch 2.00)." in done.stdout
    assert "lacks: random states of 1 of 1 process(es)" in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert (report["continues_from"], report["checkpoints"][0]["kind"]) == ("checkpoint-1", "ours")


@pytest.mark.nightly
def test_a_hostile_file_is_refused_with_a_message_and_no_traceback(folder) -> None:
    done = run(folder, "--convert", "hostile.pth", "--model", "base", "--output_dir", "hostile")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]  # bitsandbytes, where it is installed, may complain of a kernel before
    assert said.startswith("CheckpointError: hostile.pth: damaged, or more than tensors; nothing was run (asks for")
    assert "Traceback" not in done.stderr
    assert not (folder / "canary").exists()
    assert not (folder / "hostile").exists()


def test_the_exit_status_says_whether_a_run_would_continue(tmp_path, capsys) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    assert main([str(tmp_path)]) == 1
    assert "training would start at step 0" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["folder", "--convert", "a.pth"], ["--convert", "a.pth", "--model", "m"]])
def test_a_command_line_that_is_neither_use_is_refused(words) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    with pytest.raises(ArgumentError, match=r"Give a FOLDER|--convert needs"):
        main(words)
