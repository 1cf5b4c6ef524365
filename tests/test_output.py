"""Output that nobody can take any more ends nothing: behind `| head`, in a closed terminal, on a full disk."""

import errno
import io
import os
import pty
import subprocess
import sys

import pytest
from locations import ROOT
from tqdm.auto import tqdm

from hf_ext.errors import exit_on_errors

LINES = "for line in range(20_000): print('line', line, file=sys.{0}, flush=line % 100 == 0)"
PLAIN = f"import sys\n{LINES}"
OURS = f"import sys\nfrom hf_ext.errors import exit_on_errors\nwith exit_on_errors():\n    {LINES}\nopen('done', 'w')"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_reads_any_more_ends_a_plain_program_and_not_ours(tmp_path, stream):
    turned = "2>&1 >/dev/null" if stream == "stderr" else ""
    for code, ends in ((PLAIN, True), (OURS, False)):
        command = ["bash", "-c", f'set -o pipefail; "$@" {turned} | head -n 2', "-", sys.executable, "-c"]
        given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([*command, code.format(stream)], cwd=tmp_path, check=False, **given)
        assert done.stdout == "line 0\nline 1\n"
        assert (done.returncode != 0) == ends
    assert (tmp_path / "done").exists()


def broken_streams():
    """Descriptors that cannot be written to: a closed terminal, a full disk, a pipe that nobody reads."""
    master, terminal = pty.openpty()
    reader, pipe = os.pipe()
    os.close(master)
    os.close(reader)
    return terminal, os.open("/dev/full", os.O_WRONLY), pipe


def test_output_that_cannot_be_written_for_any_reason_is_dropped_and_the_other_stream_works(tmp_path, monkeypatch):
    for dead, alive in (("stdout", "stderr"), ("stderr", "stdout")):
        for descriptor in broken_streams():
            with monkeypatch.context() as patch, open(tmp_path / "alive", "w") as still:
                patch.setattr(sys, dead, os.fdopen(descriptor, "w", 1 if dead == "stderr" else -1))
                patch.setattr(sys, alive, still)
                with exit_on_errors():
                    for step in tqdm(range(3), file=getattr(sys, dead), mininterval=0):
                        print("line", file=getattr(sys, dead), flush=step == 1)
                        print("kept", file=still)
                    print("buffered to the end", file=getattr(sys, dead))
                getattr(sys, dead).close()
            assert (tmp_path / "alive").read_text().count("kept") == 3


def test_a_full_disk_is_still_told_where_the_output_is_dropped(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, open(tmp_path / "err", "w") as err:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end, exit_on_errors():  # noqa: PT012
            print("x", flush=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    assert end.value.code == 74
    assert "model.safetensors" in (tmp_path / "err").read_text()


def test_streams_without_a_descriptor_and_closed_ones_are_left_alone(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, io.StringIO(), closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with exit_on_errors():
                pass
