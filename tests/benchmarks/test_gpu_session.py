"""The session for a card nobody has measured: it runs whole, survives its parts, goes on, and overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import distributed_smoke
import gpu_session
import psutil
import pytest
import torch
from gpu import rounds
from gpu.session import ROOT, Part, Session, run_session
from gpu.shapes import SHAPES
from gpu.sides import EAGER, OURS, STOCK, Bench
from gpu.table import parts_table, speed_table
from gpu_session import PARTS, TOY_LAUNCHES, parse_arguments

from hf_ext.errors import ArgumentError

SCRIPT = ROOT / "benchmarks" / "gpu_session.py"
MACHINE = {"device": "H100-SXM", "kind": "cuda", "memory_gib": 79.1}
CODE = {"commit": "abc", "sources": "1"}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the session itself is the test")


def command(*words: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *words]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[subprocess.CompletedProcess, str]:
    """A whole session at toy size, in a process without a GPU; what it printed, and its JSON."""
    path = tmp_path_factory.mktemp("session") / "toy.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command("--size", "toy", "--output", str(path)), env=environment, capture_output=True, text=True, timeout=900
    )
    return done, path.read_text()


def results(toy) -> dict[str, dict]:
    return {name: entry["result"] for name, entry in json.loads(toy[1])["parts"].items()}


# --- the whole of it, at toy size -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_toy_session_finishes_every_part_and_measures_what_it_says(toy):
    done, text = toy
    session = json.loads(text)
    assert done.returncode == 0, text[-3000:]
    assert {name: entry["status"] for name, entry in session["parts"].items()} == dict.fromkeys(PARTS, "finished")
    assert session["machine"]["kind"] == "cpu"
    assert all(entry["code"]["sources"] for entry in session["parts"].values())
    for path in (str(ROOT), tempfile.gettempdir() + "/", sys.prefix):
        assert path not in text
    assert "test_varlen_on_a_gpu_equals_one_sequence_at_a_time" in session["parts"]["tests"]["log_end"]
    found = results(toy)
    assert [row["case"] for row in found["memory"]["ledger"]] == ["full", "LoRA"]
    assert all(abs(row["predicted_over_measured"] - 1) < 0.05 for row in found["memory"]["ledger"])
    assert found["memory"]["finder"]["found"]["rows"] == 4  # of 8, above which the imitation raises
    ladder = found["memory"]["ladder"]
    assert [rung["rung"] for rung in ladder["rungs"]] == ["2 rows at a time"]
    assert ladder["largest_difference_of_a_loss_from_a_run_begun_there"] == 0
    ddp = found["processes"]["runs"][-1]
    assert (ddp["file"], ddp["backend"], ddp["passed"]) == ("ddp", "gloo", True)


@pytest.mark.nightly
def test_each_model_and_way_has_both_sides_and_says_whether_it_packs(toy):
    cases = results(toy)["speed"]["cases"]
    assert [*cases] == [f"{name} toy, {ways}" for name in ("ESM-2", "ESMC") for ways in ("full", "lora", "frozen")]
    for name, case in cases.items():
        assert {*case["sides"]} == {STOCK, OURS} | ({EAGER} if name == "ESM-2 toy, full" else set())
        assert all(side["tokens_per_s"]["median"] > 0 for side in case["sides"].values())
        assert case["times_as_fast"][STOCK]["least"] > 0
        assert case["packing_known"] is True
        if not name.endswith("frozen"):
            # One epoch of the same rows and masks from the same weights, in another order.
            losses = [case["sides"][side]["loss"]["median"] for side in (STOCK, OURS)]
            assert losses[0] == pytest.approx(losses[1], abs=0.01)
        else:
            assert case["relative_difference"] < 1e-5
    packed = cases["ESM-2 toy, full"]["sides"]
    assert packed[STOCK]["padding_share"]["median"] > 0 == packed[OURS]["padding_share"]["median"]


# --- parts that fail ------------------------------------------------------------------------------------------------

WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'found': 1})); "
COUNT = "import pathlib, sys; p = pathlib.Path(sys.argv[2]); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"


def part(name: str, code: str, minutes: float = 1.0, *words: str) -> Part:
    return Part(name, (sys.executable, "-c", code, "{result}", *words), minutes)


def open_session(path: Path, **changed) -> Session:
    return Session(path, **{"machine": MACHINE, "code": CODE, "size": "full", **changed})


def entries(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text())["parts"]


@pytest.mark.nightly
def test_parts_that_crash_raise_hang_or_run_out_of_memory_are_recorded_and_later_ones_run(tmp_path):
    path, child = tmp_path / "session.json", tmp_path / "child"
    hang = WRITE + "import subprocess, time; c = subprocess.Popen(['sleep', '300'], start_new_session=True); "
    hang += "open(sys.argv[2], 'w').write(str(c.pid)); time.sleep(300)"
    parts = [
        part("crash", WRITE + "import os; os.abort()"),
        part("raise", f"open({str(ROOT / 'absent')!r})"),
        part("memory", "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('CUDA out of memory')"),
        part("nothing", "print('all is well')"),
        part("hang", hang, 0.4, str(child)),
        part("last", WRITE),
    ]
    assert run_session(open_session(path), parts, 0.2) is False
    found = entries(path)
    statuses = {name: entry["status"] for name, entry in found.items()}
    assert statuses == {
        **{"crash": "crashed (SIGABRT)", "raise": "failed", "memory": "out of memory", "nothing": "finished"},
        **{"hang": "timed out", "last": "finished"},
    }
    assert found["crash"]["result"] == {"found": 1}  # what it had measured until then
    assert found["hang"]["result"] == {"found": 1}
    assert "FileNotFoundError" in found["raise"]["log_end"]
    assert "'PROJECT/absent'" in found["raise"]["log_end"]
    assert found["nothing"]["log_end"] == "all is well"
    assert found["hang"]["seconds"] == pytest.approx(found["hang"]["limit_s"], abs=3)
    left = [each for each in psutil.process_iter() if str(each.pid) == child.read_text()]
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []  # what it had started is gone too


def test_a_session_goes_on_where_it_was_and_repeats_what_failed_or_was_of_other_sources(tmp_path):
    path, done, open_ = tmp_path / "session.json", tmp_path / "done", tmp_path / "open"
    good = part("good", WRITE + COUNT, 1.0, str(done))
    bad, mended = part("bad", COUNT + "; 1 / 0", 1.0, str(open_)), part("bad", WRITE + COUNT, 1.0, str(open_))
    assert run_session(open_session(path), [good, bad], 1) is False
    first = entries(path)["good"]
    assert run_session(open_session(path), [good, mended], 1) is True
    assert (done.read_text(), open_.read_text()) == ("x", "xx")
    assert entries(path)["good"] == first
    assert run_session(open_session(path, code={**CODE, "sources": "2"}), [good, mended], 1) is True
    assert (done.read_text(), open_.read_text()) == ("xx", "xxx")
    assert entries(path)["good"]["code"]["sources"] == "2"


def test_a_session_of_another_device_or_size_is_not_overwritten(tmp_path):
    path = tmp_path / "session.json"
    run_session(open_session(path), [part("good", WRITE)], 1)
    before = path.read_bytes()
    for changed in ({"machine": {**MACHINE, "device": "cpu-amx-bf16", "kind": "cpu"}}, {"size": "toy"}):
        with pytest.raises(ArgumentError, match=r"a session on H100-SXM at size full.*--output"):
            open_session(path, **changed)
    assert path.read_bytes() == before


def test_a_file_that_is_no_session_is_refused(tmp_path):
    path = tmp_path / "session.json"
    for text in ('{"runs": []}', '{"machine": null, "size": "full", "parts": {}}', "[]", "{"):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="holds no session"):
            open_session(path)


@pytest.mark.nightly
@needs_no_gpu
def test_ctrl_c_leaves_a_whole_file_and_the_same_command_goes_on(tmp_path):
    path = tmp_path / "toy.json"
    words = command("--size", "toy", "--parts", "tests", "memory", "--output", str(path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("tests: at most") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "The same command goes on." in rest
    found = entries(path)
    assert {name: entry["status"] for name, entry in found.items()} == {"tests": "interrupted"}
    session = json.loads(path.read_text())
    again = Session(path, session["machine"], found["tests"]["code"], "toy")
    assert run_session(again, [part("tests", WRITE)], 1) is True


@needs_no_gpu
def test_without_a_gpu_session_and_smoke_test_are_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "full.json"
    with pytest.raises(ArgumentError, match=r"No GPU: .*--size toy"):
        gpu_session.main(["--output", str(path)])
    with pytest.raises(ArgumentError, match="No GPU: torch sees no CUDA device"):
        distributed_smoke.main(["--output_json", str(path)])
    assert not path.exists()


def test_every_file_for_several_gpus_of_one_machine_is_launched_on_all_of_them():
    launches = distributed_smoke.choose_launches(4, has_deepspeed=True)
    assert {launch.file for launch in launches} == {"ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero3"}
    assert {(launch.processes, launch.precision) for launch in launches} == {(4, "no")}
    alone = distributed_smoke.choose_launches(1, has_deepspeed=False)
    assert [launch.file for launch in alone] == ["ddp", "fsdp2", "fsdp2_offload"]


@pytest.mark.nightly
@needs_no_gpu
def test_a_launch_that_fails_is_a_row_with_its_reason_and_an_exit_code(tmp_path):
    words = [*TOY_LAUNCHES, "--device", "cpu", "--files", "fsdp2", "--output_json", str(tmp_path / "smoke.json")]
    assert distributed_smoke.main(words) == 1
    rows = {row["file"]: row for row in json.loads((tmp_path / "smoke.json").read_text())["runs"]}
    assert "accelerate would run DDP and say nothing" in rows["fsdp2"]["failed"]


# --- sides ----------------------------------------------------------------------------------------------------------


class Small(Bench):
    """A device with room for so many rows of a side; a row takes no time. From run `breaks` on, ours raises."""

    room = {STOCK: 2, OURS: 8}
    breaks = 1_000

    def run(self, side, steps, passes, seed):
        self.breaks -= side == OURS
        if side == OURS and self.breaks < 0:
            raise ValueError("a kernel broke")
        if self.rows // passes > self.room[side]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        rate = {STOCK: 10.0, OURS: 40.0}[side] * (1 + seed)
        return {"tokens_per_s": rate, "step_s": 1.0, "wall_s": 0.0, "peak_memory_gib": 1.0, "loss": 2.0}


def make_small(**room: int) -> Small:
    bench = Small(SHAPES["toy"][0], "full", torch.device("cpu"), 8, False)
    bench.room = {**Small.room, **room}
    return bench


def test_a_side_that_is_out_of_memory_takes_half_the_rows_at_a_time():
    bench, saved = make_small(), []
    rounds.interleave(bench, [STOCK, OURS], 100.0, saved.append)
    found = saved[-1]
    assert found["sides"][STOCK]["passes_per_step"] == 4
    assert found["sides"][OURS]["passes_per_step"] == 1
    assert [(each["side"], each["rows"]) for each in found["did_not_fit"]] == [(STOCK, 8), (STOCK, 4)]
    assert found["rounds"] == rounds.ROUNDS
    assert found["times_as_fast"] == {STOCK: {"median": 4.0, "least": 4.0, "most": 4.0}}  # round by round
    assert found["sides"][STOCK]["tokens_per_s"] == {"median": 30.0, "least": 10.0, "most": 50.0}


def test_a_side_that_does_not_fit_or_raises_is_said_and_the_other_is_measured():
    bench, saved = make_small(stock=0), []
    rounds.interleave(bench, [STOCK, OURS], 100.0, saved.append)
    assert saved[-1]["sides"][STOCK] == {"not_measured": "not one row fits"}
    assert saved[-1]["sides"][OURS]["tokens_per_s"]["median"] == 120.0
    assert saved[-1]["times_as_fast"] == {STOCK: None}
    bench = make_small()
    bench.breaks = 3  # a warm-up, a run that counts steps, and then one round
    rounds.interleave(bench, [STOCK, OURS], 100.0, saved.append)
    ours = saved[-1]["sides"][OURS]
    assert (ours["tokens_per_s"]["most"], ours["ended_early"]) == (40.0, "failed: ValueError: a kernel broke")
    assert saved[-1]["times_as_fast"][STOCK]["median"] == 4.0  # of the rounds that both have
    assert saved[-1]["sides"][STOCK]["tokens_per_s"]["median"] == 30.0


# --- tables, page ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_session_of_a_card_fills_the_tables_with_what_failed_in_it_and_a_toy_does_not(toy, tmp_path):
    (tmp_path / "gpu_session_toy.json").write_text(toy[1])
    assert speed_table(tmp_path).count("not measured") == 6 * 7
    session = {**json.loads(toy[1]), "size": "full", "machine": MACHINE}
    session["parts"]["tests"] = {"status": "timed out", "result": None, "log_end": "test_a .."}
    del session["parts"]["processes"]
    (tmp_path / "gpu_session.json").write_text(json.dumps(session))
    speed, parts = speed_table(tmp_path), parts_table(tmp_path)
    assert len(speed.splitlines()) == 2 + 6 * 2 + 1
    assert "not measured" not in speed
    median = session["parts"]["speed"]["result"]["cases"]["ESM-2 toy, full"]["sides"][OURS]["tokens_per_s"]["median"]
    assert f"{median:,.0f} [" in speed
    rows = {line.split("|")[2].strip(): line for line in parts.splitlines()}
    assert "timed out" in rows["tests"]
    assert "not measured" in rows["processes"]
    assert "ladder: 2 rows at a time" in rows["memory"]


def test_the_commands_of_the_page_parse_and_every_part_stands_on_it():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"```bash\n(.*?)\n```", page)
    given = [parse_arguments(shlex.split(line.partition("gpu_session.py")[2])) for line in lines]
    assert [(args.size, args.minutes) for args in given] == [("full", 20.0)]
    assert given[0].parts == [*PARTS]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*PARTS]
    assert sum(PARTS.values()) == 20.0
