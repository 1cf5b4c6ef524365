"""A recipe outside of training: signals end it as a stop does, in time, and output that nobody reads ends nothing."""

import errno
import io
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from locations import ROOT
from tqdm.auto import tqdm

from hf_ext.errors import TrainingStopped, exit_on_errors
from hf_ext.reporting.run_log import start_run_log

HEAD = """
import ctypes, os, signal, sys, time
from pathlib import Path
from hf_ext import interruption
from hf_ext.errors import exit_on_errors
interruption.PATIENCE_S = 1.0
def ready(): Path("ready").write_text("")
with exit_on_errors():
"""
WAITS = "    ready(); time.sleep(30)"
# What the kernel goes on with after a signal: a wait for others in native code.
STUCK = """
    signal.siginterrupt(signal.SIGTERM, False)
    ready()
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""
TIDIES = """
    try:
        ready(); time.sleep(30)
    finally:
        time.sleep(0.5)
        Path("tidied").write_text("")
"""
SWALLOWS = """
    try:
        ready(); time.sleep(30)
    except KeyboardInterrupt:
        time.sleep(30)
"""
FORKS = """
    child = os.fork()
    if child == 0:
        time.sleep(30)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(1.5)
    print("went on")
"""


def start(folder, body, **given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HEAD + body]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **given)


def signalled(folder, body, *names):
    """Status, stderr and seconds of a process that is signalled once it is ready."""
    with start(folder, body) as process:
        ends = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        time.sleep(0.1)  # from the file to the wait
        began = time.monotonic()
        for name in names:
            process.send_signal(getattr(signal, name))
            time.sleep(0.1)
        _, error = process.communicate(timeout=30)
        return process.returncode, error, time.monotonic() - began


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_each_signal_outside_of_training_ends_a_recipe_as_a_stop_does(tmp_path, name):
    status, error, _ = signalled(tmp_path, WAITS, name)
    assert (status, error.count("Traceback")) == (75, 0)
    assert f"Interrupted by {name}. Files that were saved are whole; the same command goes on" in error


@pytest.mark.parametrize("body", [STUCK, SWALLOWS])
def test_what_does_not_come_to_an_end_is_ended_in_time_with_the_same_status(tmp_path, body):
    status, _, seconds = signalled(tmp_path, body, "SIGTERM")
    assert status == 75
    assert 0.9 < seconds < 10


def test_machines_that_repeat_themselves_do_not_break_into_tidying_up(tmp_path):
    assert signalled(tmp_path, TIDIES, "SIGTERM", "SIGTERM", "SIGHUP")[0] == 75
    assert (tmp_path / "tidied").exists()


def test_a_signal_to_a_forked_process_is_its_own(tmp_path):
    with start(tmp_path, FORKS, stdout=subprocess.PIPE) as process:
        output, error = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "went on\n"), error


def test_nothing_is_left_of_it_and_handlers_of_others_stay(capsys):
    def own(number, frame):
        raise AssertionError

    threads, before = threading.active_count(), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, own)
        with pytest.raises(SystemExit) as end, exit_on_errors():
            signal.raise_signal(signal.SIGHUP)
        assert end.value.code == TrainingStopped.exit_code
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Interrupted by SIGHUP" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_reads_any_more_ends_nothing(tmp_path, stream):
    body = f"""
    for line in range(20_000):
        print("line", line, file=sys.{stream}, flush=line % 100 == 0)
    Path("done").write_text("")
"""
    command = [sys.executable, "-c", HEAD + body]
    turned = "2>&1 >/dev/null" if stream == "stderr" else ""
    shell = f'set -o pipefail; "$@" {turned} | head -n 2'
    given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", "-c", shell, "-", *command], cwd=tmp_path, check=False, **given)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\nline 1\n", "")
    assert (tmp_path / "done").exists()


def test_without_it_the_same_output_ends_the_process(tmp_path):
    command = [sys.executable, "-c", "for line in range(20_000): print('line', line)"]
    done = subprocess.run(["bash", "-c", 'set -o pipefail; "$@" | head -n 2', "-", *command], check=False, cwd=tmp_path)
    assert done.returncode != 0


def broken_streams(folder):
    """Descriptors that cannot be written to, each for another reason: errno name -> descriptor."""
    master, terminal = pty.openpty()
    os.close(master)
    read_only = folder / "read_only"
    read_only.touch()
    reader, pipe = os.pipe()
    os.close(reader)
    far, near = (lambda server: (socket.create_connection(server.getsockname()), server.accept()[0]))(
        socket.create_server(("127.0.0.1", 0))
    )
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    far.close()
    return {
        "EIO": terminal,
        "ENOSPC": os.open("/dev/full", os.O_WRONLY),
        "EBADF": os.open(read_only, os.O_RDONLY),
        "EPIPE": pipe,
        "ECONNRESET": near.detach(),
    }


def test_output_that_cannot_be_written_for_any_reason_is_dropped_and_said_once_in_the_log(tmp_path, monkeypatch):
    """Prints, logging and progress bars; buffered, too, until the end. The other stream still works."""
    for dead, alive in (("stdout", "stderr"), ("stderr", "stdout")):
        for name, descriptor in broken_streams(tmp_path).items():
            place = tmp_path / f"{name} {dead}"
            place.mkdir()
            with monkeypatch.context() as patch, open(place / "alive", "w") as still:
                patch.setattr(sys, dead, os.fdopen(descriptor, "w", 1 if dead == "stderr" else -1))
                patch.setattr(sys, alive, still)
                with exit_on_errors():
                    log = start_run_log(place)
                    for step in tqdm(range(3), file=getattr(sys, dead), mininterval=0):
                        print("line", file=getattr(sys, dead), flush=step == 1)
                        print("kept", file=still)
                        log.info("step %d", step)
                    print("buffered to the end", file=getattr(sys, dead))
                getattr(sys, dead).close()
                start_run_log(None)
            lines = (place / "run.log").read_text().splitlines()
            said = [line for line in lines if f"{dead} cannot be written to any more" in line]
            assert len(said) == 1, (name, dead, lines)
            assert os.strerror(getattr(errno, name)) in said[0]
            assert [line[-6:] for line in lines if line not in said] == ["step 0", "step 1", "step 2"]
            assert (place / "alive").read_text().count("kept") == 3


def fill_the_disk():
    print("x", flush=True)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")


def test_a_full_disk_is_still_told_where_the_output_is_dropped_and_nothing_else_is_taken_for_one(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, open(tmp_path / "err", "w") as err:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end, exit_on_errors():
            fill_the_disk()
    assert end.value.code == 74
    assert "model.safetensors" in (tmp_path / "err").read_text()


def test_a_reader_that_is_slow_loses_a_piece_and_not_the_stream(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", os.fdopen(writer, "w"))
        with exit_on_errors():
            print("x" * 1_000_000, flush=True)
            os.read(reader, 1_000_000)
            print("later", flush=True)
        assert b"later" in os.read(reader, 1_000_000)
        sys.stdout.close()


def test_streams_without_a_descriptor_and_closed_ones_are_left_alone(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, io.StringIO(), closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with exit_on_errors():
                pass
