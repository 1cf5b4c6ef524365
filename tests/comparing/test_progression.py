"""Progressions from the command line: what runs, in which order and with what, and what the table makes of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import timed_recipe

from hf_ext.comparing.phases import run_phases
from hf_ext.comparing.progression import judge
from hf_ext.comparing.progression_file import Phase, Progression
from hf_ext.comparing.running import ChildFailed, SideRun
from hf_ext.errors import ArgumentError

ROOT = Path(__file__).parents[2]
TEXT = """
name: by hand
claimed: 5
baseline: {arguments: {seconds: 1.0, speedups: [precision]}, claimed_memory: 15}
phases:
  - {name: half, arguments: {seconds: 0.5, memory: 2}, claimed: 1.5}
  - {name: on cards, arguments: {seconds: 0.1}, claimed: 1.25, claimed_memory: 20, needs: cuda}
  - {name: idle, arguments: {speedups: [tf32]}, claimed: [1.1, 1.2]}
  - {name: slower, arguments: {seconds: 0.8}}
"""


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs recipes/compare.py on a progression; returns its exit status."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: str) -> int:
        Path("phases.yaml").write_text(text)
        own, _, shared = " ".join(arguments).partition("--- ")
        recipe = ["--recipe", timed_recipe.__file__, "--output_dir", "out", *own.split()]
        words = ["--progression", "phases.yaml", *recipe, "--", *shared.split()]
        return importlib.import_module("compare").main(words)

    return run


def read_result() -> dict:
    return json.loads(Path("out/comparison.json").read_text())


def rows_of_table() -> dict[str, list[str]]:
    lines = [line for line in Path("out/comparison.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_phases_stand_on_one_another_and_each_is_judged_against_the_one_before(compare):
    assert compare(TEXT, "--rounds 2 --metric score.value") == 0
    found = {row["name"]: row for row in read_result()["phases"]}
    values = {
        name: [row[kind]["step"]["value"] for kind in ("speedup", "cumulative")]
        for name, row in found.items()
        if not row["why_not"]
    }
    expected = {"half": [2.0, 2.0], "idle": [1.0, 2.0], "slower": [0.625, 1.25]}
    assert values == {name: pytest.approx(both) for name, both in expected.items()}
    assert [found[name]["after"] for name in values] == ["baseline", "half", "idle"]
    assert {name: row.get("verdict") for name, row in found.items()} == {
        "half": "pays here",
        "on cards": None,
        "idle": "does not pay here",
        "slower": "does not pay here: slower",
    }
    sides = read_result()["sides"]
    assert sides["idle"]["arguments"] == ["--seconds", "0.5", "--speedups", "precision", "tf32", "--memory", "2"]
    assert sides["slower"]["arguments"] == ["--seconds", "0.8", "--speedups", "precision", "tf32", "--memory", "2"]
    turns = ["baseline", "half", "idle", "slower"]
    assert Path("calls.txt").read_text().split() == [f"{side}/round_{i}" for i in (0, 1) for side in turns]


def test_the_table_has_claims_beside_what_was_measured(compare):
    assert compare(TEXT, "--rounds 1 --metric score.value --seed 7") == 0
    rows = rows_of_table()
    assert rows["baseline"][-7:] == ["-", "1,000 / 500", "4 = 4 x 1 x 1", "1.00 / 15", "2.075", "7", ""]
    assert rows["half"][:5] == ["1.5x", "2.00x [2.00, 2.00]", "2.00x", "2.00x [2.00, 2.00]", "2.00x"]
    assert rows["half"][-5:] == ["4 = 4 x 1 x 1", "2.00", "2.075 (+0)", "7", "pays here"]
    assert rows["on cards"][0] == "1.25x"
    assert rows["on cards"][-1] == "not measured: needs a CUDA device, and this machine has none"
    assert rows["on cards"][-4] == "- / 20"
    assert rows["idle"][-1] == "does not pay here; tf32 skipped: no tensor cores"
    assert rows["**3 phases together**"][0] == "5x"
    text = Path("out/comparison.md").read_text()
    assert "One round only" in text
    assert "All phases take the same rows per optimizer step." in text
    assert "Claimed: 5x in all; the product of the claims is 2.06-2.25x, of those measured here 1.65-1.8x." in text
    assert Path("out/comparison.png").read_bytes().startswith(b"\x89PNG")


def test_each_alone_is_measured_and_the_product_stands_beside_the_whole(compare):
    text = TEXT.replace("arguments: {seconds: 0.8}", "arguments: {seconds: 0.25}")
    assert compare(text, "--rounds 1 --singles true") == 0
    result = read_result()
    alone = {row["name"]: row["alone"]["step"]["value"] for row in result["phases"] if not row["why_not"]}
    assert alone == {"half": 2.0, "idle": 1.0, "slower": 4.0}
    whole = result["whole"]
    assert (whole["speedup"]["step"]["value"], whole["product_of_singles"]["step"]["value"]) == (4.0, 8.0)
    line = "In steps by the clock, all 3 measured phases together: 4.00x [4.00, 4.00]; the product of each alone "
    line += "on the baseline: 8.00x"
    assert line in Path("out/comparison.md").read_text()
    assert result["sides"]["only slower"]["arguments"] == ["--seconds", "0.25", "--speedups", "precision"]
    assert "only_half" not in Path("calls.txt").read_text()  # the first phase stands alone already


def test_a_phase_of_the_loop_is_judged_by_the_loop(compare):
    text = "name: a\nbaseline: {arguments: {evaluation: 20}}\nphases:\n"
    text += "  - {name: rarer validation, arguments: {evaluation: 0}, judged_by: loop}\n"
    assert compare(text, "--rounds 2") == 0
    (row,) = read_result()["phases"]
    assert {kind: ratio["value"] for kind, ratio in row["speedup"].items()} == {"step": 1.0, "cpu": 1.0, "loop": 2.0}
    assert row["verdict"] == "pays here"
    assert rows_of_table()["rarer validation"][1] == "2.00x [2.00, 2.00], of the loop"
    assert compare(text.replace(", judged_by: loop", ""), "--rounds 2") == 0  # the twin, judged by steps
    assert read_result()["phases"][0]["verdict"] == "does not pay here"
    assert compare(text, "--rounds 1") == 0
    assert read_result()["phases"][0]["verdict"] == "not shown: one round has one time of the loop"


def test_on_a_shared_machine_the_processor_judges(compare):
    text = "name: a\nbaseline: {}\nphases: [{name: waits, arguments: {seconds: 0.5, processor: 0.5}}]\n"
    assert compare(text, "--rounds 2 --timed_by processor --min_speedup 1.5") == 3
    (row,) = read_result()["phases"]
    assert {kind: ratio["value"] for kind, ratio in row["speedup"].items()} == {"step": 2.0, "cpu": 1.0, "loop": 2.0}
    assert row["verdict"] == "does not pay here"
    rows = rows_of_table()
    assert rows["phase"][1:4] == ["this phase", "by the clock", "so far"]
    assert rows["waits"][1:4] == ["1.00x [1.00, 1.00]", "2.00x", "1.00x [1.00, 1.00]"]
    assert compare(text, "--rounds 2 --min_speedup 1.5") == 0  # the same runs, by the clock
    assert rows_of_table()["waits"][1:4] == ["2.00x [2.00, 2.00]", "1.00x", "2.00x [2.00, 2.00]"]


def test_another_batch_is_said_in_the_row_and_below(compare):
    text = "name: a\nbaseline: {arguments: {rows: 8, passes: 2}}\nphases:\n"
    text += "  - {name: same, arguments: {rows: 16, passes: 1}}\n  - {name: more, arguments: {rows: 16, passes: 2}}\n"
    assert compare(text, "--rounds 1") == 0
    rows = rows_of_table()
    assert [rows[name][7] for name in ("baseline", "same", "more")] == [
        "16 = 8 x 2 x 1",
        "16 = 16 x 1 x 1",
        "32 = 16 x 2 x 1",
    ]
    assert [row["same_sequences_per_step"] for row in read_result()["phases"]] == [True, False]
    assert rows["more"][-1].endswith("other rows per step than the baseline")
    assert "NOT at the baseline's rows per optimizer step" in Path("out/comparison.md").read_text()
    assert "losses by step differ: more." in Path("out/comparison.md").read_text()


def test_a_phase_that_fails_is_told_and_carried_no_further(compare):
    text = TEXT.replace("{name: half, arguments: {seconds: 0.5, memory: 2}", "{name: half, arguments: {crash: true}")
    assert compare(text, "--rounds 2") == 0
    found = {row["name"]: row for row in read_result()["phases"]}
    assert found["half"]["why_not"] == "failed: row 7: no sequence"
    assert found["idle"]["after"] == "baseline"
    assert rows_of_table()["half"][-1] == "failed: row 7: no sequence"
    with pytest.raises(ChildFailed, match="baseline, round 0"):
        compare(TEXT.replace("{seconds: 1.0,", "{crash: true,"), "--rounds 1 --output_dir other")


def test_nothing_runs_where_no_phase_can(compare):
    text = "name: cards\nbaseline: {}\nphases: [{name: a, needs: cuda}, {name: b, needs: cuda}]\n"
    with pytest.raises(ArgumentError, match=r"cards: this machine can run no phase \(needs a CUDA device, and"):
        compare(text)
    assert not Path("calls.txt").exists()


def test_a_phase_that_fails_later_has_no_numbers():
    def run_one(side, round_):
        if (side.name, round_) == ("b", 1):
            raise ChildFailed("b, round 1: exit status 1.\nout of memory")
        return SideRun(side, round_)

    progression = Progression("x", Phase("baseline", {}), (Phase("a", {"x": "1"}), Phase("b", {"y": "1"})))
    baseline, (a, b) = run_phases(progression, 3, run_one)
    assert (len(baseline), len(a.runs), b.runs, b.why) == (3, 3, [], "failed: out of memory")


def test_killed_and_started_again_it_keeps_what_was_measured(compare):
    assert compare(TEXT, "--rounds 1 --metric score.value") == 0
    first = Path("calls.txt").read_text().split()
    record = json.loads(Path("out/slower/round_0.run.json").read_text())
    Path("out/slower/round_0.run.json").write_text(json.dumps({**record, "seconds": None, "owner": record["owner"]}))
    assert compare(TEXT, "--rounds 2 --metric score.value") == 0
    again = Path("calls.txt").read_text().split()[len(first) :]
    assert again == ["slower/round_0", *(f"{side}/round_1" for side in ("baseline", "half", "idle", "slower"))]
    with pytest.raises(ArgumentError, match="half/round_0 is there already, from another command or other files"):
        compare(TEXT.replace("seconds: 0.5", "seconds: 0.4"), "--rounds 1")


def test_a_run_that_another_process_still_writes_is_left_alone(compare):
    assert compare(TEXT, "--rounds 1") == 0
    path = Path("out/half/round_0.run.json")
    record = json.loads(path.read_text())
    began = psutil.Process(1).create_time()
    path.write_text(json.dumps({**record, "seconds": None, "owner": {**record["owner"], "pid": 1, "began": began}}))
    with pytest.raises(ArgumentError, match="half/round_0: process 1 is writing there"):
        compare(TEXT, "--rounds 1")


HOLD = """
import sys, time
from hf_ext.checkpoints.run_lock import hold_folder
with hold_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.nightly
def test_a_run_that_outlived_its_comparison_is_not_written_over(compare):
    assert compare(TEXT, "--rounds 1") == 0
    folder, path = Path("out/half/round_0"), Path("out/half/round_0.run.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": None}))
    left = {file.name for file in folder.iterdir()}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "held\n"
            with pytest.raises(ArgumentError, match=rf"half/round_0 is in use by another run: process {child.pid} "):
                compare(TEXT, "--rounds 1")
        finally:
            child.kill()
    assert {file.name for file in folder.iterdir()} > left
    assert compare(TEXT, "--rounds 1") == 0


def test_the_command_line_wins_over_the_file_and_phases_win_over_it(compare):
    text = TEXT.replace("claimed: 5\n", "common: {rows: 8, memory: 3}\n")
    assert compare(text, "--rounds 1", "--- --rows 2 --seconds 9") == 0
    result = read_result()
    assert result["arguments"] == ["--rows", "8", "--memory", "3", "--rows", "2", "--seconds", "9"]
    assert result["baseline"]["batch"] == [2, 1, 1]
    assert [result["sides"][name]["peak_memory_gib"] for name in ("baseline", "half")] == [3.0, 2.0]
    assert result["phases"][0]["speedup"]["step"]["value"] == 2.0


def test_a_warm_up_of_each_phase_is_run_and_discarded(compare):
    text = "name: a\nbaseline: {}\nphases: [{name: fast, arguments: {seconds: 0.5}}]\n"
    assert compare(text, "--rounds 1 --warmup_run true") == 0
    turns = ["baseline/warmup", "baseline/round_0", "fast/warmup", "fast/round_0"]
    assert Path("calls.txt").read_text().split() == turns
    assert list(read_result()["sides"]) == ["baseline", "fast"]


@pytest.mark.nightly
def test_criteria_are_of_all_phases_together(compare):
    assert compare(TEXT, "--rounds 2 --min_speedup 1.2 --max_memory_gib 2 --max_loss_delta 0") == 0
    assert compare(TEXT, "--rounds 2 --min_speedup 1.3") == 3
    assert [line["line"][:4] for line in read_result()["criteria"]] == ["FAIL"]
    assert compare(TEXT, "--rounds 1 --min_speedup 1.3") == 4  # one round says nothing of other rounds
    assert [line["verdict"] for line in read_result()["criteria"]] == ["TOO NOISY TO TELL"]


@pytest.mark.parametrize(
    ("interval", "says"),
    [((1.01, 1.2), "pays here"), ((1.0, 1.2), "does not pay here"), ((0.8, 0.99), "does not pay here: slower")],
)
def test_a_gain_that_the_interval_does_not_show_does_not_pay(interval, says):
    assert judge(dict(zip(("low", "high"), interval))) == says


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--singles", "true"], "--singles runs the phases of --progression"),
        (["--progression", "x.yaml", "--max_rounds", "9"], "leave --max_rounds out"),
        (
            ["--progression", "x.yaml", "--optimized", "low_disk", "--ablate", "true"],
            "leave --optimized and --ablate out",
        ),
        (["--progression", "absent.yaml"], "absent.yaml': cannot be read"),
    ],
)
def test_arguments_that_contradict_a_progression_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    with pytest.raises(ArgumentError, match=message):
        importlib.import_module("compare").main(["--output_dir", str(tmp_path / "out"), *words])


def test_two_yaml_files_are_held_against_the_criteria_at_other_batches(tmp_path, monkeypatch):
    """The baseline takes 40 steps of 4 rows, the other 20 of 8: final losses are those of their own last steps."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    Path("slow.yaml").write_text("seconds: 1.0\nrows: 4\nsteps: 40\n")
    Path("fast.yaml").write_text("seconds: 0.25\nrows: 8\nsteps: 20\nworse: 0.0005\n")
    limits = ["--min_speedup", "3", "--max_loss_delta", "0.001", "--max_memory_gib", "50"]
    sides = ["--baseline", "slow.yaml", "--optimized", "fast.yaml", "--seed", "42", "--rounds", "2"]
    words = ["--recipe", timed_recipe.__file__, *sides, *limits]
    compare = importlib.import_module("compare").main
    # The last 4 of 40 losses are 2.1 to 2.025, the last 2 of 20 are 2.1 and 2.05: means 2.0625 and 2.075.
    assert compare([*words, "--output_dir", "out", "--", "--num_train_epochs", "20"]) == 3
    result = read_result()
    assert result["against"]["slow"]["loss"]["final"] == pytest.approx(2.075 + 0.0005 - 2.0625)
    assert [line["passed"] for line in result["criteria"]] == [True, False, True]
    Path("fast.yaml").write_text("seconds: 0.25\nrows: 8\nsteps: 20\nworse: -0.0120\n")
    assert compare([*words, "--output_dir", "again", "--", "--num_train_epochs", "20"]) == 0
    Path("fast.yaml").write_text("seconds: 0.25\nrows: 8\nsteps: 20\n")
    with pytest.raises(ArgumentError, match="fast/round_0 is there already, from another command or other files"):
        compare([*words, "--output_dir", "again", "--", "--num_train_epochs", "20"])
