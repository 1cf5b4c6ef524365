"""launch/slurm.sbatch, run by programs in the place of SLURM's: what it asks for, its signal, who is queued again.

`accelerate` is a program too that starts ranks without torch; with the real one: test_launchers.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from locations import HELPERS, ROOT
from slurm_jobs import submit

SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
STOPPED = 75


@pytest.fixture
def programs(tmp_path) -> Path:
    """A folder with an `accelerate` that notes its arguments and runs the words of start N and of its node."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "accelerate"
    lines = [
        "#!/bin/bash",
        f'echo "$@" >>"{tmp_path}/arguments-$SLURM_NODEID"',
        f'echo "$NCCL_DEBUG $NCCL_MIN_NCHANNELS" >"{tmp_path}/nccl"',
        f'mkdir -p "{tmp_path}/node-$SLURM_NODEID"',
        'words="WORDS_${SLURM_RESTART_COUNT:-0}_$SLURM_NODEID"',
        f'exec {sys.executable} {HELPERS}/small_launcher.py "{tmp_path}/node-$SLURM_NODEID" "${{!words}}"',
    ]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    return folder


def test_the_time_limit_saves_queues_again_and_the_next_start_ends_the_job(tmp_path, programs):
    words = {"WORDS_0_0": "waits,waits_long", "WORDS_1_0": "done,done"}
    limit = os.pathsep.join(str(tmp_path / "node-0" / f"ready-{rank}") for rank in range(2))  # both hear of it
    job = submit(tmp_path / "slurm", SCRIPT, "--seed", "1", path=programs, FAKE_LIMIT=limit, **words)
    assert job.statuses == [STOPPED, 0], job.output
    asked = {"signal": "TERM@120", "requeue": "", "open-mode": "append", "ntasks-per-node": "1", "nodes": "1"}
    assert {name: job.options.get(name) for name in asked} == asked
    first, second = (tmp_path / "arguments-0").read_text().splitlines()
    assert first == second  # the same command again
    assert (tmp_path / "nccl").read_text() == "WARN 4\n"
    assert "--num_machines 1 --num_processes 4 --main_process_ip 127.0.0.1 --main_process_port 2" in first
    assert first.endswith("-m hf_ext train --output_dir outputs/affinity --seed 1")
    assert first.startswith("launch --machine_rank 0 --config_file accelerate_configs/ddp.yaml")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "status"), [("nan,0.3:stopped", 65), ("killed,killed", 1), ("traceback,0.3:stopped", 1)]
)
def test_what_did_not_save_and_stop_is_not_queued_again(tmp_path, programs, words, status):
    job = submit(tmp_path / "slurm", SCRIPT, path=programs, WORDS_0_0=words)
    assert job.statuses == [status], job.output
    assert job.left == []


def test_a_run_that_never_gets_further_is_not_queued_for_ever(tmp_path, programs):
    words = {f"WORDS_{start}_0": "stopped" for start in range(4)}
    job = submit(tmp_path / "slurm", SCRIPT, path=programs, MAX_REQUEUES="1", **words)
    assert job.statuses == [STOPPED, STOPPED], job.output
    assert "submit it again yourself" in job.output


def test_two_nodes_have_a_launcher_each_and_stop_together(tmp_path, programs):
    words = {"WORDS_0_0": "waits", "WORDS_0_1": "waits_long", "WORDS_1_0": "done", "WORDS_1_1": "done"}
    limit = os.pathsep.join(str(tmp_path / f"node-{node}" / "ready-0") for node in range(2))
    job = submit(tmp_path / "slurm", "--nodes", "2", SCRIPT, path=programs, PROCESSES="1", FAKE_LIMIT=limit, **words)
    assert job.statuses == [STOPPED, 0], job.output
    assert job.output.count("TrainingStopped: 1 signals") == 2, job.output  # and not that nobody was asked
    assert "--num_machines 2 --num_processes 2" in (tmp_path / "arguments-1").read_text()
    assert (tmp_path / "arguments-1").read_text().startswith("launch --machine_rank 1 ")


def test_one_process_is_started_without_a_launcher_that_would_leave_it_training(tmp_path, programs):
    train = f"{HELPERS}/launched_rank.py {tmp_path} waits"
    limit = str(tmp_path / "ready-0")
    given = {"PROCESSES": "1", "TRAIN": train, "FAKE_LIMIT": limit, "FAKE_START_1": f"TRAIN={tmp_path}/no.py"}
    job = submit(tmp_path / "slurm", SCRIPT, path=programs, **given)
    assert job.statuses == [STOPPED, 2], job.output  # the second start: python finds no such file
    assert not (tmp_path / "arguments-0").exists()


def test_numbers_are_numbers_and_nothing_in_them_runs(tmp_path, programs):
    job = submit(tmp_path / "slurm", SCRIPT, path=programs, PROCESSES=f"a[$(touch {tmp_path}/ran)]")
    assert job.statuses == [1]
    assert "must be numbers" in job.output
    assert not (tmp_path / "ran").exists()


def test_bash_reads_the_script():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
