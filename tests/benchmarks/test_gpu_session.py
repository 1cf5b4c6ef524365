"""`benchmarks/gpu_session.py`: one command that measures a card in eight minutes, whatever becomes of its parts."""

import fcntl
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gpu_rounds
import gpu_session
import pytest
import torch
from gpu_parts import OURS, STOCK, choose_shape
from gpu_rounds import Entry
from gpu_session import FINISHED, PARTS, name_output, open_session, parse_arguments
from gpu_tables import parts_table, speed_table
from gpu_training import COMPILED, build_masked_lm, is_enough, train_once

from hf_ext.errors import ArgumentError
from hf_ext.hardware import detect_hardware

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"device": "H100-SXM", "kind": "cuda", "memory_gib": 80.0}
SESSION = {"size": "full", "machine": MACHINE, "commit": "1", "parts": {}}
TRAINING = ("full_esm2", "lora_esm2", "full_esmc", "generator")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict:
    """A whole session at toy size, in a process without a GPU."""
    path = tmp_path_factory.mktemp("session") / "toy.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, gpu_session.__file__, "--size", "toy", "--output", str(path), "--minutes", "30"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1900)
    assert done.returncode == 0, path.read_text()[-3000:]
    return json.loads(path.read_text())


@pytest.mark.nightly
def test_a_toy_session_finishes_every_part_and_measures_what_it_says(toy):
    assert {name: part["status"] for name, part in toy["parts"].items()} == dict.fromkeys(PARTS, FINISHED)
    found = {name: part["result"] for name, part in toy["parts"].items()}
    assert {*found["encoding"]["relative_difference"]} == {"ESM-2 650M", "ESM C 300M"}
    assert max(found["encoding"]["relative_difference"].values()) < 1e-5
    kernels = {side.rpartition(", ")[2] for side in found["encoding"]["rounds"]}
    assert kernels == {STOCK, OURS, "faesm_sdpa", "fa2", "flex"}
    for name in TRAINING:
        assert {*found[name]["rounds"]} == {STOCK, OURS}
        # The same rows and masks from the same weights, in another order.
        losses = [turns[0]["loss"] for turns in found[name]["rounds"].values()]
        assert losses[0] == pytest.approx(losses[1], abs=0.1)
        assert ("not compiled" in found[name]["problems"].get(COMPILED, "not compiled")) is True
    for (turn,) in found["memory"]["rounds"].values():
        assert turn["predicted_bytes"] == pytest.approx(turn["measured_bytes"], rel=0.05)
    assert [turn["passed"] for (turn,) in found["processes"]["rounds"].values()] == [True]


@pytest.mark.nightly
@pytest.mark.parametrize("lora", [False, True])
def test_every_turn_of_a_side_begins_at_the_same_weights_whatever_the_other_side_did_to_them(lora, bf16_cpu):
    hardware, shape = detect_hardware("cpu"), choose_shape(None, is_toy=True)
    subject = build_masked_lm("esm2", lora, shape, hardware)
    entry = Entry({}, math.inf)
    assert entry.take_rounds({side: partial(train_once, side, subject, hardware, entry) for side in (STOCK, OURS)}, 2)
    assert entry.result["problems"] == {}
    for first, second in entry.result["rounds"].values():
        assert first["loss"] == second["loss"]


def test_a_turn_whose_time_is_used_ends_after_a_step_that_counts_and_a_side_that_fails_says_why():
    now, ends = [0.0], []

    def take(seconds, entry):
        now[0] += seconds
        ends.append(entry.turn_ends)
        return {}

    entry = Entry({}, ends=100.0, clock=lambda: now[0])
    sides = {"slow": lambda: take(30, entry), "fails": (ROOT / "absent").read_text, "fast": lambda: take(10, entry)}
    assert not entry.take_rounds(sides, 3)
    assert {side: len(turns) for side, turns in entry.result["rounds"].items()} == {"slow": 2, "fast": 2}
    assert ends[:2] == [100 / 3, 100]  # a share of what is left for each side without a round
    assert entry.result["problems"]["fails"].endswith("'PROJECT/absent'")
    assert entry.result["now"] == "slow, round 3"
    shape = choose_shape(None, is_toy=True)
    entry.turn_ends = now[0]
    assert [is_enough(step, shape, entry) for step in (1, 2)] == [False, True]


@pytest.mark.nightly
def test_a_session_of_a_card_fills_the_tables_with_what_failed_in_it_and_a_toy_does_not(toy, tmp_path):
    (tmp_path / "gpu_session_toy.json").write_text(json.dumps(toy))
    assert speed_table(tmp_path).count("not measured") == 5 * 8
    session = {**toy, "size": "full", "machine": MACHINE}
    session["parts"]["generator"] = {"status": "timed out", "reason": "in stock, round 1", "result": {}}
    del session["parts"]["processes"]
    (tmp_path / "gpu_session.json").write_text(json.dumps(session))
    speed, parts = speed_table(tmp_path), parts_table(tmp_path)
    assert len(speed.splitlines()) == 2 + 3 * 3 + 1 + 4 + 3  # compiled is a line that says why it is not
    assert "not measured" not in speed
    assert re.search(r"generator, Transformer +\| - +\| +- \| timed out: in stock, round 1", speed)
    rows = {line.split("|")[2].strip(): line for line in parts.splitlines()}
    assert "not measured" in rows["processes"]
    assert rows["memory"].count("GiB predicted") == 3
    session["parts"]["memory"]["result"]["problems"] = {"LoRA, bf16": "OutOfMemoryError: CUDA out of memory"}
    (tmp_path / "gpu_session.json").write_text(json.dumps(session))
    assert "LoRA, bf16: OutOfMemoryError: CUDA out of memory" in parts_table(tmp_path)


def test_a_file_that_kept_quartiles_of_its_three_rounds_is_still_read(tmp_path):
    of_side = {"tokens_per_s": {"stock": [90.0, 100.0, 102.0], "max_speed": [150.0, 150.0, 160.0]}}
    of_side |= {"peak_memory_gib": {"stock": 2.0, "max_speed": 1.0}, "times_as_fast": [1.45, 1.5, 1.6]}
    encoding = {"status": "finished", "result": {"ESM C 300M": {**of_side, "relative_difference": 0.0123}}}
    (tmp_path / "gpu_session.json").write_text(json.dumps({**SESSION, "parts": {"encoding": encoding}}))
    *_, stock, ours = (re.sub(" +", " ", line) for line in speed_table(tmp_path).splitlines())
    assert "| stock | 3 | 100 [80, 104] | - | - | 2.0 | - | - |" in stock  # three of which 90, 100, 102 are quartiles
    assert "| max_speed | 3 | 150 [150, 170] | - | - | 1.0 | 1.50x [1.40, 1.70] | states off by 1.23% |" in ours


def test_the_page_says_where_faesms_kernel_was_not_measured_and_why(tmp_path):
    outcomes = {
        "tests/a.py::one": "passed",
        "tests/a.py::two": "skipped pip install",
        "tests/a.py::three": "failed 1 is 2",
    }
    tests = {"status": "failed with exit code 1", "reason": "1 tests failed", "result": {"tests": outcomes}}
    for version in (None, "2.8.3"):
        session = {**SESSION, "versions": {"flash-attn": version}, "parts": {"tests": tests}}
        (tmp_path / "gpu_session.json").write_text(json.dumps(session))
        (row,) = [line for line in parts_table(tmp_path).splitlines() if " tests " in line]
        assert "failed with exit code 1: 1 tests failed" in row
        assert "1 passed, 1 skipped, 1 failed; a.py::three" in row
        assert ("flash-attn was not installed: it and faesm's kernel not measured" in row) is (version is None)


def test_parts_that_crash_raise_or_hang_are_recorded_with_what_they_had_found_and_later_ones_run(tmp_path, monkeypatch):
    saves = "from gpu_rounds import *; import subprocess; e = open_entry(Path(sys.argv[1]), sys.argv[2], 1e9); "
    saves += "turn = e.result['turns'] = e.result.get('turns', 0) + 1; e.begin('turn 2'); "
    codes = {
        "tests": "import os; os.abort()",
        "full_esm2": f"open({str(ROOT / 'absent')!r})",
        "memory": saves + "subprocess.Popen([sys.executable, '-c', HELD]); print('begun', flush=True); time.sleep(60)",
        "encoding": saves + "sys.exit(75 * (turn == 1))",
        "processes": saves,
    }
    held = tmp_path / "held"  # a lock that a rank would keep, as it would memory of the card
    codes = {
        part: f"import sys; sys.path.insert(0, {str(gpu_session.BENCHMARKS)!r}); {code}" for part, code in codes.items()
    }
    hold = f"import fcntl, time; file = open({str(held)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(60)"
    codes["memory"] = codes["memory"].replace("HELD", repr(hold))
    monkeypatch.setattr(gpu_session, "make_command", lambda part, s, path, e: ["-c", codes[part], str(path), part])
    monkeypatch.setattr(gpu_session, "PARTS", tuple(codes))
    monkeypatch.setattr(gpu_session, "GRACE_S", 0.4)
    monkeypatch.setattr(gpu_rounds, "LEAST_S", 1.0)
    monkeypatch.setattr(gpu_session, "detect_machine", lambda: MACHINE)
    path, began = tmp_path / "session.json", time.monotonic()
    words = ["--size", "toy", "--parts", *codes, "--output", str(path), "--minutes", "0.3"]
    assert gpu_session.main(words) == 1
    assert time.monotonic() - began < 18
    found = json.loads(path.read_text())["parts"]
    ends = {name: (part["status"], part["reason"]) for name, part in found.items()}
    assert ends["tests"][0] == "failed with exit code -6"
    assert ends["full_esm2"][0] == "failed with exit code 1"
    assert "'PROJECT/absent'" in ends["full_esm2"][1]
    assert ends["memory"] == ("timed out", "in turn 2")
    assert found["memory"]["log_end"] == ["begun"]
    assert found["memory"]["result"] == {"turns": 1}
    with held.open() as file:  # it ended with its part
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ends["encoding"] == (FINISHED, "")  # cut, and begun again in the time that others left
    assert found["encoding"]["result"] == {"turns": 2}
    assert ends["processes"] == (FINISHED, "")
    # Started again it repeats what failed and keeps what finished.
    codes |= {"tests": "", "full_esm2": "", "memory": codes["encoding"], "processes": "1 / 0"}
    assert gpu_session.main(words) == 0
    assert json.loads(path.read_text())["parts"]["memory"]["result"] == {"turns": 2}


def test_only_a_session_of_this_machine_size_and_commit_is_continued(tmp_path):
    path = tmp_path / "session.json"
    done = {**SESSION, "parts": {"tests": {"status": "finished"}, "memory": {"status": "timed out"}}}
    path.write_text(json.dumps(done))
    assert open_session(path, SESSION)["parts"] == done["parts"]
    assert open_session(path, {**SESSION, "commit": "2"})["parts"] == {}
    for changed in ({"machine": {**MACHINE, "device": "A100"}}, {"size": "toy"}):
        with pytest.raises(ArgumentError, match=r"of another machine or --size.*--output"):
            open_session(path, {**SESSION, **changed})
    for text in ('{"runs": []}', '{"machine": null, "size": "full", "parts": {}}', "[]", "{"):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="holds no session"):
            open_session(path, SESSION)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they run, and the first takes half an hour")
def test_without_a_gpu_it_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ArgumentError, match=r"No GPU: .*--size toy"):
        gpu_session.main(["--output", str(tmp_path / "full.json")])
    assert not [*tmp_path.iterdir()]


def test_each_card_has_a_file_of_its_own():
    names = [
        name_output(size, {**MACHINE, "device": card}).name for size, card in (("full", "A100 80GB"), ("toy", "cpu"))
    ]
    assert names == ["gpu_session_a100_80gb.json", "gpu_session_toy.json"]


def test_the_commands_of_the_page_parse_and_every_part_stands_on_it():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"```bash\n(.*gpu_session.*?)\n```", page)
    given = [parse_arguments(shlex.split(line.partition("gpu_session.py")[2])) for line in lines]
    assert [(args.size, args.minutes, args.parts) for args in given] == [("full", 8.0, [*PARTS])]
    table = page.partition("| part | what it measures |")[2].partition("\n\n")[0]
    assert all(f"`{part}`" in table for part in PARTS)
