"""Output that nobody can take any more ends nothing: behind `| head`, in a closed terminal, on a full disk."""

import errno
import io
import os
import pty
import socket
import struct
import subprocess
import sys

import pytest
from locations import ROOT
from tqdm.auto import tqdm

from hf_ext.errors import exit_on_errors
from hf_ext.reporting.run_log import start_run_log

HEAD = """
import sys
from pathlib import Path
from hf_ext.errors import exit_on_errors
with exit_on_errors():
"""


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


def test_a_full_disk_is_still_told_where_the_output_is_dropped(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, open(tmp_path / "err", "w") as err:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end, exit_on_errors():  # noqa: PT012
            print("x", flush=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
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
