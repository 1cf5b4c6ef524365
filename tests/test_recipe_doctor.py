"""`hf-ext doctor` as users call it: the page, the exit status, and that it leaves nothing behind."""

import importlib
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest
import torch

from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Calls the recipe in an empty folder; returns exit status and page."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)
    recipe = importlib.import_module("hf_ext.doctor.command")

    def call(*words: str) -> tuple[int, str]:
        status = recipe.main(["--measure_seconds", "0", *words])
        return status, capsys.readouterr().out

    return call


def test_the_demo_on_this_machine_exits_with_0_and_writes_nothing(doctor, tmp_path):
    status, page = doctor("--measure_seconds", "0.1")  # as a process of its own: test_notebook.py
    assert status == 0
    assert page.startswith("This command would run on ")
    assert "the demo, none of your rows (--dataset_name FILE)" in " ".join(page.split())
    assert len(page.splitlines()) <= 46
    assert list(tmp_path.iterdir()) == []


def test_a_t4_is_described_with_its_plan_and_estimate(doctor):
    status, page = doctor("--device", "t4", "--tower_training", "full")
    assert status == 0
    told = " ".join(page.split())
    assert "machine: T4, 16 GiB, described;" in told
    assert f"GiB free; torch {torch.__version__} plan" in told  # of a build for CUDA 12.8 it ends in +cu128
    assert "trains in fp16 with loss scaling: no native bf16;" in told
    assert "plan, preset max_speed: precision, " in told
    assert "3% to 20% of T4's 65 TFLOP/s in fp16 (published; the share is assumed)" in told
    assert "--encoders biohub/ESMC-600M (frozen, lora, full)" in told
    assert page.count("\n") <= 40


@pytest.mark.nightly
def test_what_would_be_refused_exits_with_1(doctor):
    status, page = doctor("--device", "t4", "--bf16", "true", "--tower_training", "full")
    assert status == 1
    assert "STOPS plan: precision: bf16 is not native on T4" in page
    assert "    -> use --fp16" in page
    own = [line for line in page.splitlines() if "real_accelerator.py" not in line]  # DeepSpeed, where it is installed
    assert own[0] == "This command would not run to its end on T4: see STOPS."
    assert "change first: use --fp16" in page


@pytest.mark.nightly
def test_an_argument_of_mlm_asks_about_mlm(doctor):
    status, page = doctor("--device", "h100", "--model_size", "esm2_650M", "--max_steps", "10")
    assert status == 0
    assert "masked_lm_head" in page
    assert "weights 2.43 GiB" in page  # 651,043,254 parameters of 4 bytes
    assert "masked_lm_head" not in doctor("--device", "h100")[1]


@pytest.mark.nightly
def test_an_argument_of_the_generator_asks_about_its_stages(doctor):
    status, page = doctor("--stage", "auto", "--size", "tiny", "--device", "t4")
    assert status == 0
    lines = page.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("stage ")]
    assert lines[first].split() == ["stage", "trained", "rows", "steps", "PFLOP", "time,", "at", "most", "cost"]
    rows = [line.split() for line in lines[first + 2 : first + 5]]
    assert [row[:2] for row in rows] == [["1", "tiny"], ["2", "tiny"], ["3", "tiny"]]
    assert all(row[5].isdecimal() for row in rows)
    assert all(row[-1] == "-" for row in rows)  # without --dollars_per_hour


@pytest.mark.nightly
def test_every_config_is_examined(doctor):
    left_out = ("mlm_stock_best", "progression_")  # of comparisons
    examined = [path.name for path in CONFIGS if not path.name.startswith(left_out)]
    assert len(examined) == 12
    for name in examined:
        status, page = doctor("--config", str(ROOT / "recipes" / "configs" / name), "--device", "a100-80gb")
        assert status == 1  # their data lie nowhere here
        assert "STOPS data: data/" in page
        assert "on A100-80GB" in page


def test_several_machines_are_one_table_with_what_each_would_cost(doctor):
    words = ["--tower_training", "full", "--bf16", "true", "--device", "t4", "t4", "a100"]
    status, page = doctor(*words, "--dollars_per_hour", "36000", "72000", "36000")
    assert status == 0  # on one of them
    rows = [re.split(r"\s{2,}", line.strip()) for line in page.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [["T4", "no"], ["T4", "no"], ["A100-40GB", "yes"]]
    half, twice = ([float(cost.replace(",", "")) for cost in re.findall(r"\$(\S+)", row[4])] for row in rows[:2])
    assert twice == pytest.approx([2 * cost for cost in half], rel=0.3)  # reading rows took another time
    assert "T4\nWhat is off, and the remedy:\n  STOPS plan: precision: bf16 is not native on T4" in page
    status, page = doctor(*words[:-2], "--dollars_per_hour", "36000")
    cost = re.search(r"cost: +\$(\S+) to \$", page)
    assert (status, float(cost[1].replace(",", ""))) == (1, pytest.approx(half[0], rel=0.3))
    for prices in (["1", "2"], ["0"], ["nan"]):
        with pytest.raises(ArgumentError, match="dollars_per_hour="):
            doctor(*words, "--dollars_per_hour", *prices)
    with pytest.raises(ArgumentError, match="Unknown hardware 't44'"):
        doctor("--device", "t4", "t44")


def test_a_mistake_is_named_with_the_nearest_flag(doctor):
    with pytest.raises(ArgumentError, match="'--learning_rate'"):
        doctor("--learning_rat", "1")
    for name in ("t44", ""):
        with pytest.raises(ArgumentError, match=f"Unknown hardware '{name}'"):
            doctor("--device", name)


def write_rows(path: Path, labels: list[str]) -> None:
    """`labels` beside random sequences of 12 residues; the last one is there twice."""
    rng = random.Random(0)
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=12)) for _ in labels]
    rows[-1] = rows[0]
    path.write_text("sequence,pKd\n" + "".join(f"{row},{label}\n" for row, label in zip(rows, labels)))


@pytest.mark.nightly
def test_rows_and_labels_are_read_and_said_in_the_words_of_the_run(
    doctor, tmp_path, monkeypatch, demo_encoders, capsys
):
    """90 labels, of which 30 are the lowest: what a detection limit looks like."""
    write_rows(tmp_path / "rows.csv", [f"{max(5.0, 3.5 + i / 20):.2f}" for i in range(90)])
    words = ["--dataset_name", "rows.csv", "--label_column", "pKd", "--encoders", demo_encoders[1], "--use_cpu", "true"]
    status, page = doctor(*words)
    assert status == 0
    told = " ".join(page.split())
    importlib.import_module("max_speed").main(
        [*words, "--max_steps", "2", "--disable_tqdm", "true", "--embedding_cache_dir", "cache"]
    )
    said = capsys.readouterr().out
    data = said[said.index("Data: 90 rows read") :].splitlines()[0]
    assert data in told
    assert said[said.index("Best checkpoint: ") :].splitlines()[0] in told
    alarms = [" ".join(line.split()) for line in said.splitlines() if "ALARM: 34" in line]
    assert len(alarms) == 1
    assert "a detection limit? If so, write them as <=5" in alarms[0]
    assert alarms[0] in told


def test_every_note_of_the_run_about_its_rows_stands_in_the_page(doctor, tmp_path, monkeypatch, demo_encoders, capsys):
    """Repeats that disagree, a column that says which rows validate, and test rows that are in training."""
    rng = random.Random(0)
    sequences = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=12)) for _ in range(30)] * 2
    parts = ["test" if row % 6 == 5 else "train" for row in range(60)]
    terms = [f"GO:{row // 30}" for row in range(60)]
    lines = [f"{one},{term},{part},{row < 6}\n" for row, (one, term, part) in enumerate(zip(sequences, terms, parts))]
    (tmp_path / "rows.csv").write_text("sequence,term,set,validation\n" + "".join(lines))
    files = ["--dataset_name", "rows.csv", "--label_column", "term", "--split_column", "set", "--use_cpu", "true"]
    words = [*files, "--encoders", demo_encoders[1]]
    status, page = doctor(*words)
    assert status == 0
    told = " ".join(page.split())
    small = ["--max_steps", "1", "--head_sizes", "4", "--disable_tqdm", "true", "--embedding_cache_dir", "cache"]
    importlib.import_module("max_speed").main([*words, *small, "--output_dir", "out"])
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "all_results.json").read_text())["data"]
    notes = [*record["split"]["notes"], *record["notes"], *record["warnings"]]
    assert len(notes) == 2
    first = said.index("Data: 60 rows read")
    logged = said[first : said.index("Training labels: ")].splitlines()
    assert len(logged) == 6  # rows, copies twice, the longest input, and the notes
    for text in [*notes, *logged]:
        assert " ".join(text.split()) in told, text


def test_labels_that_the_run_would_refuse_and_splits_that_it_would_miss_stop_it_here(doctor, tmp_path, demo_encoders):
    words = ["--dataset_name", "rows.csv", "--label_column", "pKd", "--encoders", demo_encoders[1]]
    write_rows(tmp_path / "rows.csv", ["5"] * 20)
    status, page = doctor(*words)
    assert status == 1
    assert "all 16 training labels are 5, so there is nothing to learn" in " ".join(page.split())
    write_rows(tmp_path / "rows.csv", [str(i) for i in range(20)])
    status, page = doctor(*words, "--split_sizes", "0.8", "0.2", "0")
    assert status == 1
    assert "There is no test split" in page


def test_encoders_left_out_are_those_of_this_device_and_the_doctor_says_so(doctor, tmp_path):
    write_rows(tmp_path / "rows.csv", [str(i) for i in range(20)])
    words = ["--dataset_name", "rows.csv", "--label_column", "pKd", "--use_cpu", "true"]
    _, page = doctor(*words, "--device", "t4")
    assert "--encoders left out: biohub/ESMC-600M, the best that fits T4 and is fast enough" in " ".join(page.split())
    _, page = doctor(*words, "--device", "a100", "--tower_training", "full")
    assert "biohub/ESMC-600M, the best that fits A100-40GB and is fast enough there (full)" in " ".join(page.split())
    with pytest.raises(ArgumentError, match="esm2_t12_35M_UR50D") as told:  # which is not here, and nothing downloads
        importlib.import_module("max_speed").main(words)
    assert "No encoder" not in str(told.value)
