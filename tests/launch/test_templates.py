"""launch/ and the page about it: what is started elsewhere is run or parsed here."""

import ast
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from documented_commands import read_commands
from locations import HELPERS, ROOT

from hf_ext import __version__
from hf_ext.errors import RunEnded

LAUNCH = ROOT / "launch"
NAMES = {"slurm.sbatch", "hf_jobs.py"}
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="ascii")


def test_each_template_has_its_command_and_what_was_not_tried_in_its_head():
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == NAMES
    for name in NAMES:
        head = " ".join((LAUNCH / name).read_text(encoding="ascii")[:1600].replace("\n#", " ").split())
        assert f"launch/{name}" in head
        assert re.search(r"not (run )?on (a cluster|Jobs)", head), name


@pytest.mark.parametrize(("words", "stop", "status"), [("0.3:stopped,nan", False, 65), ("waits_long", True, 75)])
def test_the_lines_for_another_scheduler_pass_sigterm_on_and_end_with_the_status_of_the_ranks(
    tmp_path, words, stop, status
):
    (lines,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "accelerate"
    program.write_text(f'#!/bin/bash\nexec {sys.executable} {HELPERS}/small_launcher.py "{tmp_path}" {words}\n')
    program.chmod(0o755)
    given = {**os.environ, "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(["bash", "-c", lines], env=given, cwd=ROOT) as process:
        ends = time.monotonic() + 60
        while stop and not (tmp_path / "ready-0").exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        if stop:
            process.terminate()
        assert process.wait(60) == status


def test_the_head_of_the_jobs_script_is_what_uv_reads():
    """The `script` block of PEP 723."""
    block = (LAUNCH / "hf_jobs.py").read_text().partition("# /// script\n")[2].partition("# ///\n")[0]
    assert tomllib.loads(block.replace("# ", "")) == {
        "requires-python": ">=3.11",
        "dependencies": ["hf_ext"],  # that which was built here, and no other of this name
        "tool": {"uv": {"sources": {"hf_ext": {"path": f"/wheels/hf_ext-{__version__}-py3-none-any.whl"}}}},
    }


def test_the_jobs_script_launches_one_process_per_gpu_into_the_bucket():
    command = runpy.run_path(str(LAUNCH / "hf_jobs.py"))["command"](["--max_hours", "7.5"], 2)
    assert " ".join(command) == (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 -m hf_ext train "
        "--output_dir /outputs/run "
        "--local_checkpoint_dir /tmp/checkpoints --max_hours 7.5"
    )


def test_hugging_face_reads_the_command_as_it_is_meant(tmp_path):
    """The client's own dry run, which sends nothing; its server is a port at which nobody listens."""
    head = ast.get_docstring(ast.parse((LAUNCH / "hf_jobs.py").read_text()))
    command = re.search(r"hf (jobs uv run .*gb1.yaml)", head.replace("\\\n", " "))[1].split()
    hf = [str(Path(sys.executable).with_name("hf")), *command[:3]]
    known = subprocess.run([*hf, "--help"], capture_output=True, text=True, check=True).stdout
    if "--dry-run" not in known or "--attempts" not in known:
        pytest.skip("a huggingface_hub before 2.4")
    given = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "", "HOME": str(tmp_path)}
    dry = [*hf, "--dry-run", "--namespace", "USER", *command[3:]]
    said = subprocess.run(dry, env=given, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    found = dict(re.findall(r"(?m)^  (\w+) +(.*)$", said))
    wanted = {
        "script": "launch/hf_jobs.py",
        "args": "--max_hours 7.5 --config gb1.yaml",
        "timeout": "8h",
        "attempts": "20",
    }
    assert {name: found[name] for name in wanted} == wanted, said
    assert found["volumes"] == "./dist:/wheels"
    assert "hf://buckets/USER/BUCKET:/outputs" in said
    assert float(command[-3]) < float(found["timeout"].removesuffix("h"))  # it stops itself before it is stopped


def test_the_page_has_every_status_of_a_run():
    rows = re.findall(r"(?m)^\| ([\d, ]+?) +\|", PAGE)
    named = {int(number) for row in rows for number in row.split(",")}
    ends = {kind.exit_code for kind in RunEnded.__subclasses__() if kind.__module__ == "hf_ext.errors"}
    assert named == ends | {0, 1, 137}


def test_the_commands_of_the_page_are_those_of_the_templates():
    commands = [command for command in read_commands(ROOT / "docs" / "distributed.md") if "launch/" in command]
    assert len(commands) == 2
    for command in commands:
        (name,) = re.findall(r"launch/([\w.]+)", command)
        head = (LAUNCH / name).read_text().replace("\\\n", " ")
        start = " ".join(command.split(" --config")[0].split(" --max_hours")[0].split())
        assert start in " ".join(head.split()), command
