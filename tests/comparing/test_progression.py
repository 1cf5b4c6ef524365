"""Phases on top of one another: what each is run with, the factors worked out by hand, what is refused, and a kill."""

import json
from pathlib import Path

import commands
import pytest
import yaml
from documented_commands import start
from inside import ChildFailed

from hf_ext.errors import ArgumentError
from hf_ext.files import CONFIGS, find_shipped

ROOT = Path(__file__).parents[2]
# Ten steps of an epoch in 10 s, in half of it with --bf16, and 1.25 times as fast with --fast; all is twice as slow in
# the second round. With --processes 4 it says that it ran there.
RECIPE = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in "logging_strategy logging_steps seed report_to disable_tqdm embedding_cache_dir output_dir preset".split():
    parser.add_argument(f"--{name}")
for name in "bf16 fast speedups processes max_steps".split():
    parser.add_argument(f"--{name}", nargs="+", default=[])
given = parser.parse_args()
folder = pathlib.Path(given.output_dir)
with open("runs", "a") as file:
    file.write(folder.parent.name + "\\n")
if given.fast and pathlib.Path("broken").exists():
    sys.exit("row 7: no sequence")
seconds = 10 * (int(given.seed) - 41) / (2 if given.bf16 == ["true"] else 1) / (1.25 if given.fast else 1)
totals = {"sequences": 100, "seconds": seconds}
throughput = {"unit": "sequences", "measured_steps": 10, "warmup_steps": 0, "steps_per_epoch": 10, "totals": totals}
throughput |= {"rates": {"data_wait_share": 0}, "log_history": [{"loss": 0.5}], "peak_memory_gib": 2, "device": "cpu"}
throughput |= {"seconds_before_training": 1, "num_processes": int((given.processes or [1])[0])}
(folder / "throughput.json").write_text(json.dumps(throughput))
(folder / "all_results.json").write_text(json.dumps({"eval_loss": 0.25}))
off = [{"name": "compile", "status": "skipped", "reason": "no compiler"}] * ("compile" in given.speedups)
(folder / "plan.json").write_text(json.dumps({"decisions": off}))
(folder / "words").write_text(json.dumps(sys.argv))
"""
PHASES = [
    {"name": "half precision", "arguments": {"bf16": True}, "claimed": [1.5, 2]},
    {"name": "TF32", "arguments": {"fast": 9}, "claimed": [1.2], "needs": {"gpus": 99}},
    {"name": "compile", "arguments": {"speedups": ["compile"]}, "claimed": 1.1, "note": "as claimed"},
    {"name": "fast", "arguments": {"fast": 1e-4, "speedups": ["packing"]}},
]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_recipe(tmp_path, monkeypatch) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def write(phases: object = PHASES, **more: object) -> str:
    Path("mine.yaml").write_text(json.dumps({"base": {"speedups": ["muon"]}, "phases": phases, **more}))  # YAML too
    return "mine.yaml"


def compare(*words: str, file: str | None = None, shared: tuple[str, ...] = ()) -> int:
    given = ["--progression", file or write(), "--recipe", "recipe.py", "--output_dir", "out", *words]
    return commands.compare([*given, "--", "--max_steps", "5", *shared])


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_phase_runs_on_top_of_those_before_it_and_its_factors_are_those_of_the_rounds() -> None:
    assert compare("--rounds", "2", "--dollars_per_hour", "3600", "--min_speedup", "2.4") == 0
    assert Path("runs").read_text().split() == ["base", "half_precision", "compile", "fast"] * 2  # taking turns
    words = json.loads(Path("out/fast/round_1/words").read_text())
    assert words[words.index("--speedups") : -2] == [  # the base, what all have, the phases
        *("--speedups", "muon", "--max_steps", "5"),
        *("--bf16", "true", "--speedups", "muon", "compile", "packing", "--fast", "0.0001"),
    ]
    page = Path("out/comparison.md").read_text()
    lines = page.splitlines()
    table = [columns(line) for line in lines[lines.index(next(one for one in lines if one.startswith("| side"))) :]]
    rows = {row[0]: dict(zip(table[0], row)) for row in table[2:7]}
    assert [*rows] == ["base", "half precision", "compile", "fast", "TF32"]
    shown = {name: [row["an epoch"], row["so far"], row["this phase"], row["claimed"]] for name, row in rows.items()}
    assert shown["base"] == ["15 s", "-", "-", "-"]  # the median of 10 and 20 s
    assert shown["half precision"] == ["7.5 s", "2.00x [2.00, 2.00]", "2.00x [2.00, 2.00]", "1.5-2"]
    assert shown["fast"] == ["6 s", "2.50x [2.50, 2.50]", "1.25x [1.25, 1.25]", ""]
    assert rows["compile"]["note"] == "as claimed; compile skipped: no compiler"
    assert rows["fast"]["note"] == ""  # said once, where it was asked for
    assert (rows["fast"]["peak GiB"], rows["fast"]["final loss"], rows["fast"]["eval_loss"]) == (
        *("2.000", "0.5 (0.5 to 0.5)", "0.25 (0.25 to 0.25)"),
    )
    assert (rows["base"]["$ an epoch"], rows["fast"]["$ an epoch"]) == ("15.00", "6.00")
    assert rows["TF32"]["note"] == "left out: needs gpus 99"
    assert rows["TF32"]["an epoch"] == "-"
    # 1.5 x 1.1 and 2 x 1.1: not the claim of what did not run.
    assert "2.50x [2.50, 2.50], the product of each over the one before. What is claimed of these, " in page
    assert "multiplied: 1.65x to 2.2x." in page
    # 1 s before the first step, then 15 or 6 s an epoch: (1 + 50 x 15) / 3600, (1 + 50 x 6) / 3600.
    assert [columns(line) for line in lines if line.startswith("|     50")] == [["50", "0.209", "0.0836", "0.125"]]
    assert compare("--rounds", "2", "--dollars_per_hour", "3600", "--min_speedup", "2.6") == 3


def test_a_progression_goes_on_where_it_was_ended() -> None:
    Path("broken").touch()
    with pytest.raises(ChildFailed, match=r"fast, round 0: exit status 1(.|\n)*row 7: no sequence"):
        compare("--rounds", "1")
    Path("broken").unlink()
    assert compare("--rounds", "1") == 0
    assert Path("runs").read_text().split() == ["base", "half_precision", "compile", "fast", "fast"]


def test_a_poor_scaling_says_ddp_where_one_process_held_the_model() -> None:
    four = {"name": "four", "arguments": {"processes": 4, "bf16": True}}
    compare("--rounds", "1", file=write([four]))
    said = "4 processes are 0.50 of 4 times as fast, and 1 hold the model: take DDP (ddp.yaml), not FSDP2"
    page = Path("out/comparison.md").read_text()
    assert said in page
    assert "these, multiplied: -." in page  # nothing is claimed
    fast = {"name": "fast", "arguments": {"processes": 2, "bf16": True}}  # twice as fast on two
    commands.compare(["--progression", write([fast]), "--recipe", "recipe.py", "--output_dir", "b", "--rounds", "1"])
    assert "processes are" not in Path("b/comparison.md").read_text()


REFUSED = {
    "another key": ({"claims": 3}, None, "keys .'claims'.*It has base"),
    "no phases": ({"phases": None}, None, "progression mine.yaml: .*It has base"),
    "an unknown key of a phase": ({}, {"claim": [2]}, "unexpected keyword argument 'claim'.*claimed"),
    "a name of no folder": ({}, {"name": "a/b"}, "phases .*'a/b'.*letters, digits"),
    "the name of the base": ({}, {"name": "base"}, "phases .'base'.*a name of its own"),
    "a claim in words": ({}, {"claimed": ["fast"]}, "claimed .'fast'.: give a factor, or least and most"),
    "a claim that falls": ({}, {"claimed": [2, 1]}, "phase .*, claimed .2, 1.: give a factor, or least and most"),
    "a need that nobody knows": ({}, {"needs": {"flash": True}}, "'flash'.*fields of Hardware"),
    "nothing that can run": ({}, {"needs": {"gpus": 99}}, "no phase can run on this machine: .*needs gpus 99"),
    "a folder of its own": ({}, {"arguments": {"output-dir": "x"}}, "'output_dir'.* .output_dir is each run's own"),
    "an unknown argument": ({}, {"arguments": {"fsat": 1}}, "recipe.py takes no 'fsat', did you mean 'fast'"),
    "a launch file that is absent": ({}, {"launch": "absent.yaml"}, "--progression absent.yaml: cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused_before_the_first_run(name) -> None:
    top, phase, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        compare(file=write(**{"phases": [{"name": "one", "arguments": {"fast": 1}, **(phase or {})}], **top}))
    assert not Path("runs").exists()


def test_keys_given_twice_arguments_after_the_dashes_and_other_flags_are_refused() -> None:
    Path("twice.yaml").write_text("base: {}\nphases:\n- name: a\n  arguments: {max-steps: 1, max_steps: 2}\n")
    with pytest.raises(ArgumentError, match=r"twice\.yaml line 4: 'max_steps' is already given on line 4"):
        compare(file="twice.yaml")
    two = [{"name": "one", "arguments": {"fast": 1}}] * 2
    with pytest.raises(ArgumentError, match="a name of its own"):
        compare(file=write(two))
    with pytest.raises(ArgumentError, match=r"recipe\.py takes no 'fats'"):
        compare(shared=("--fats", "1"))
    with pytest.raises(ArgumentError, match=r"--progression goes with .*--rounds.* alone: leave out --optimized"):
        compare("--optimized", "baseline")
    assert not Path("runs").exists()


SHIPPED = {  # what makes it small, and what of it a CPU runs; but for compiling, which takes minutes on one core
    "affinity": (
        "--max_train_samples 240 --num_train_epochs 1 --logging_steps 1",
        "FlashAttention,bf16,prefetching,accumulation,fused optimizer,rarer validation,few checkpoints",
    ),
    "pde": (
        "--resolution 32 --num_queries 1024 --hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 "
        "--max_steps 6 --logging_steps 1 --num_train_samples 96 --num_eval_samples 8 --effective_batch_size 48",
        "checkpointing,loss frequency,data loading,bf16,fused AdamW",
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_lists_that_ship_are_read_and_have_arguments_of_their_recipes(name) -> None:
    with pytest.raises(ArgumentError, match="takes no "):  # the file itself is in order
        compare(file=f"progression_{name}.yaml")
    program = {"affinity": "hf-ext train", "pde": "recipes/examples/pde_operator/train.py"}[name]
    given = yaml.safe_load(find_shipped(f"progression_{name}.yaml", CONFIGS).read_text())
    for arguments in (given["base"], *(phase["arguments"] for phase in given["phases"])):
        words = [
            f"--{key} {' '.join(map(str, value if isinstance(value, list) else [value]))}"
            for key, value in arguments.items()
        ]
        start(f"{program} {' '.join(words)}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHIPPED)
def test_the_phases_that_ship_run_on_a_cpu_but_for_those_that_cannot(name) -> None:
    small, phases = SHIPPED[name]
    file = find_shipped(f"progression_{name}.yaml", CONFIGS).read_text()
    assert file.count("[compile]") == 1
    Path("small.yaml").write_text(file.replace("{speedups: [compile]}", "{}"))
    recipe = {"affinity": "train", "pde": str(ROOT / "recipes" / "examples" / "pde_operator" / "train.py")}[name]
    words = ["--progression", "small.yaml", "--recipe", recipe, "--output_dir", "out", "--rounds", "1"]
    assert commands.compare([*words, "--", *small.split(), "--use_cpu", "true"]) == 0
    found = json.loads(Path("out/comparison.json").read_text())
    assert [one for one in found["sides"] if one not in ("base", "compile")] == phases.split(",")
    left_out = [one["note"] for one in found["phases"] if one["name"] not in found["sides"]]
    assert left_out
    assert all(note.startswith("left out: needs") for note in left_out)
    assert all(side["peak_memory_gib"] > 0 and side["final_loss"] for side in found["sides"].values())
