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
import yaml
from documented_commands import read_commands
from locations import HELPERS, ROOT

from hf_ext import __version__
from hf_ext.errors import RunEnded

LAUNCH = ROOT / "launch"
NAMES = {"slurm.sbatch", "hf_jobs.py", "vast.sh", "skypilot.yaml"}
NCCL = {"NSOCKS_PERTHREAD": "4", "SOCKET_NTHREADS": "2", "MIN_NCHANNELS": "4", "P2P_DISABLE": "0", "IB_DISABLE": "0"}
# A launcher that notes each start; its processes end with the next of some statuses, and it, as the real ones, with 1.
LAUNCHER = """#!/bin/bash
echo "$NCCL_DEBUG $NCCL_NSOCKS_PERTHREAD $*" >>"{folder}/starts"
statuses=({statuses})
status=${{statuses[$(wc -l <"{folder}/starts") - 1]}}
[ "$status" -le 1 ] || echo "$status" >>"$HF_EXT_STATUS_FILE"
exit $((status > 0))
"""
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="ascii")


def test_each_template_has_its_command_and_what_was_not_tried_in_its_head():
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == {*NAMES, "nccl.sh"}
    for name in NAMES:
        text = (LAUNCH / name).read_text(encoding="ascii")
        head = " ".join(text[:1600].replace("\n#", " ").split())
        assert f"launch/{name}" in head
        assert re.search(r"not (run )?on (a cluster|Jobs|Vast|a cloud)", head), name
        assert len(re.findall(r"(?m)^\s*[^#\s]", text)) <= 40, name


def write_programs(folder: Path, **texts: str) -> dict[str, str]:
    """An environment in which these programs come before all others."""
    (folder / "programs").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "programs" / name).write_text(text)
        (folder / "programs" / name).chmod(0o755)
    return {**os.environ, "PATH": os.pathsep.join([str(folder / "programs"), os.environ["PATH"]])}


ENDS = [("75 75 0", 3, 0), ("75 65 0", 2, 65), ("1 0", 1, 1), ("75 75 75 75", 3, 75)]


@pytest.mark.parametrize(("statuses", "num_starts", "end"), ENDS)
def test_vast_starts_again_after_75_alone_and_stops_the_instance_once(tmp_path, statuses, num_starts, end):
    programs = {"git": f"mkdir hf_ext && cp -r {LAUNCH} hf_ext", "pip": "", "vastai": f'echo "$*" >>{tmp_path}/stops'}
    texts = {name: f"#!/bin/bash\n{text}\n" for name, text in programs.items()}
    given = write_programs(tmp_path, torchrun=LAUNCHER.format(folder=tmp_path, statuses=statuses), **texts)
    home = tmp_path / "home"
    home.mkdir()
    given |= {"HOME": str(home), "REPO": "https://...", "FLAGS": "--max_hours 7.5  --seed 1", "MAX_RESTARTS": "2"}
    given |= {"CONTAINER_ID": "7", "CONTAINER_API_KEY": "key"}
    command = ["bash", str(LAUNCH / "vast.sh")]
    assert subprocess.run(command, env=given, cwd=tmp_path).returncode == end
    starts = (tmp_path / "starts").read_text().splitlines()
    words = f"-m hf_ext train --output_dir {home}/outputs/run --save_minutes 15 --max_hours 7.5 --seed 1"
    assert starts == [f"WARN 4 --standalone --nproc_per_node gpu {words}"] * num_starts
    assert subprocess.run(command, env=given, cwd=tmp_path).returncode == 0  # started to fetch what came out
    assert (tmp_path / "starts").read_text().splitlines() == starts
    assert (tmp_path / "stops").read_text() == "stop instance 7 --api-key key\n"


@pytest.mark.parametrize(("statuses", "num_starts", "end"), ENDS[:3])
def test_skypilot_recovers_from_75_alone_with_the_same_command(tmp_path, statuses, num_starts, end):
    job = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    recovery = job["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    given = write_programs(tmp_path, accelerate=LAUNCHER.format(folder=tmp_path, statuses=statuses))
    given |= {**job["envs"], "FLAGS": "--seed 1", "HOME": str(tmp_path)}
    given |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    status = 75
    while status in recovery["recover_on_exit_codes"]:
        status = subprocess.run(["bash", "-c", job["run"]], env=given, cwd=ROOT).returncode
    assert status == end
    (command,) = {*(starts := (tmp_path / "starts").read_text().splitlines())}
    assert len(starts) == num_starts
    assert " --num_machines 2 --machine_rank 1 --num_processes 8 --main_process_ip 10.0.0.1 --main_p" in command
    assert command.endswith(f" --local_checkpoint_dir {tmp_path}/checkpoints --save_minutes 15 --seed 1")


def test_skypilots_and_vasts_own_parsers_read_both():
    script = (LAUNCH / "vast.sh").read_text()
    assert len(script) <= 4048  # Vast takes no longer ones
    sky, vast = (pytest.importorskip(name, reason="pip install skypilot vastai") for name in ("sky", "vastai.utils"))
    (resources,) = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml")).resources
    assert (resources.accelerators, resources.job_recovery["recover_on_exit_codes"]) == ({"A100": 4}, [75])
    words = re.search(r"--env '(.*)'", script)[1]
    assert vast.parse_env(words) == {"REPO": "https://...", "FLAGS": "--config recipes/configs/gb1.yaml"}


def test_nccl_is_told_what_the_block_says_unless_it_was_told_before(monkeypatch):
    print_all = f"source {LAUNCH}/nccl.sh && env"
    own = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    for given, debug in (({}, "WARN"), ({"NCCL_DEBUG": "INFO"}, "INFO")):
        said = subprocess.run(["bash", "-c", print_all], env={**own, **given}, capture_output=True, text=True).stdout
        assert dict(re.findall(r"(?m)^NCCL_(\w+)=(.*)$", said)) == {**NCCL, "DEBUG": debug}
    assert [name for name in (*NCCL, "DEBUG") if f"| `NCCL_{name}` |" not in PAGE] == []
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(os, "execv", lambda *command: None)
    runpy.run_path(str(LAUNCH / "hf_jobs.py"), run_name="__main__")
    assert os.environ["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(("words", "stop", "status"), [("0.3:stopped,nan", False, 65), ("waits_long", True, 75)])
def test_the_lines_for_another_scheduler_pass_sigterm_on_and_end_with_the_status_of_the_ranks(
    tmp_path, words, stop, status
):
    (lines,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    program = f'#!/bin/bash\nexec {sys.executable} {HELPERS}/small_launcher.py "{tmp_path}" {words}\n'
    given = {**write_programs(tmp_path, accelerate=program), "PYTHONPATH": str(ROOT)}
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
    assert len(commands) == 4
    for command in commands:
        (name,) = re.findall(r"launch/([\w.]+)", command)
        head = (LAUNCH / name).read_text().replace("\\\n#", " ").replace("\\\n", " ")
        start = " ".join(command.split(" --config")[0].split(" --max_hours")[0].split())
        assert start in " ".join(head.split()), command
