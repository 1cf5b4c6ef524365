"""The README, docs/ and CONTRIBUTING.md say what is true: tables come from results, examples run, names are there."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from pathlib import Path
from typing import Any

import chains
import figures
import pytest
import torch
from datasets import Dataset
from documented_commands import DOCS, all_commands, commands_of, parse, read_commands, read_snippets
from tables import PAGES, TABLES, render
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.affinity.scoring import known_scores
from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.arguments.presets import PRESETS
from hf_ext.comparing.progression_file import as_flags, read_progression
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.evaluation.requirements import parse_requirements
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.speedups.facts import padding_share
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = all_commands()


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_tables_are_what_the_results_say() -> None:
    assert [path.name for path in PAGES] == ["README.md", *(path.name for path in DOCS)]
    texts = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
    shown = [name for text in texts.values() for name in re.findall(r"<!-- table: (\w+) -->", text)]
    assert {*shown} == {*TABLES}  # each stands somewhere
    for text in texts.values():
        assert render(text) == text
    assert render(README.replace("x |", "y |")) == README  # a table edited by hand would be put right
    cards = texts["speedups.md"]
    assert render(cards.replace("**Cost**", "**Price**")) == cards != cards.replace("**Cost**", "**Price**")


def test_tables_that_the_readme_had_before_there_were_pages_are_all_there() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = (
        *("embed_once", "default_runs", "scores", "compare", "attention_backward", "cpu_step", "evaluation", "faults"),
        *("generator_runs", "generator_affinities", "generator_speed", "hard_memory_limit", "same_numbers", "scaling"),
    )
    assert [name for name in named if f"<!-- table: {name} -->" not in text] == []


def test_the_picture_is_what_its_result_says_and_so_are_the_numbers_beside_it() -> None:
    for path, draw in figures.FIGURES.items():
        assert path.read_text(encoding="ascii") == draw()
    ((alternative, file),) = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    drawn = (ROOT / file).read_text(encoding="ascii")
    numbers = re.findall(r"\d\.\d\d", alternative)
    assert len(numbers) == 5
    assert [number for number in numbers if f">{number}</text>" not in drawn] == []


def test_the_readme_is_a_face_and_not_a_manual() -> None:
    lines = README.splitlines()
    assert 110 <= len(lines) <= 130
    first_screen = "\n".join(lines[:45])
    assert "hf-ext train --dataset_name" in first_screen
    assert "hf-ext predict" in first_screen
    assert 'pip install -e ".[dev]" && pytest' in README  # .ci/run takes it from here
    assert "pip install -e . && accelerate launch --quiet recipes/max_speed.py" in README
    assert len(read_commands(ROOT / "README.md")) == 5


def test_files_that_commands_name_exist() -> None:
    assert len(COMMANDS) >= 38
    for command in COMMANDS:
        for word in shlex.split(command, comments=True):
            if word.startswith(("recipes/", "accelerate_configs/")):
                assert (ROOT / word).exists(), word


def test_the_command_of_a_progression_reads_its_phases() -> None:
    commands = [command for command in commands_of("compare") if "--progression" in command]
    phases = {len(read_progression(parse(command)[0].progression).phases) for command in commands}
    assert (len(commands), phases) == (3, {8, 10})


def test_the_commands_of_the_generator_parse() -> None:
    (training,) = commands_of("generate_antibody")
    assert len(parse(training)) == 3
    (sampling,) = commands_of("sample")
    (args,) = parse(sampling)
    assert (args.decoding.num_samples, args.model) == (100, "outputs/generator")


def test_the_commands_that_evaluate_models_parse_and_so_does_what_they_require() -> None:
    rows, run, moved = (parse(command)[0] for command in commands_of("evaluate"))
    assert (len(rows.models), run.test_of, moved.test_of) == (2, "outputs/affinity", "outputs/moved")
    for args in (rows, moved):
        assert len(parse_requirements(args.require, known_scores(args.binder_threshold, None))) == 3


def test_the_comparison_commands_hand_on_their_baselines() -> None:
    page = read_commands(ROOT / "docs" / "results.md")
    baselines = [parse(command)[0].baseline for command in page if "hf-ext compare" in command]
    best = [f"recipes/configs/mlm_stock_best{name}.yaml" for name in ("", "_float32")]
    assert baselines == [["stock", *best], ["row_by_row"]]


def test_the_comparison_command_is_that_of_its_table_on_chains_as_long_as_its_own(tmp_path: Path) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "compare_mlm_8M_cpu.json").read_text())
    measured = dict(read_flags(result["arguments"]))
    command = next(line for line in COMMANDS if "hf-ext compare" in line and "chains.csv" in line)
    own, _, shared = command.partition("hf-ext compare")[2].partition(" -- ")
    said = dict(read_flags(shlex.split(shared)))
    assert said.pop("dataset_name") == ["outputs/chains.csv"]
    assert said == {name: value for name, value in measured.items() if name != "dataset_name"}
    baselines = [name for name, side in result["sides"].items() if side["role"] == "baseline"]
    assert [Path(name).stem for name in dict(read_flags(shlex.split(own)))["baseline"]] == baselines
    chains.main(["--output", str(tmp_path / "chains.csv")])
    lengths = [len(line) for line in (tmp_path / "chains.csv").read_text().splitlines()[1:]]
    assert (len(lengths), min(lengths), max(lengths)) == (1020, 60, 960)
    assert padding_share(lengths, 8) == pytest.approx(result["sides"]["stock"]["padding_share"], abs=0.04)


def read_flags(words: list[str]) -> list[tuple[str, list[str]]]:
    """(name, values) of each flag."""
    parts = " ".join(words).split("--")[1:]
    return [(part.split()[0], part.split()[1:]) for part in parts]


def test_the_checkpoint_commands_say_what_the_text_says() -> None:
    page = [command for command in read_commands(ROOT / "docs" / "resume.md") if "hf-ext resume" in command]
    folder, conversion = (parse(command) for command in page)
    assert folder.folder == "outputs/affinity"
    assert conversion.rename == [("regressor.", "head.layers.")]


def test_the_doctor_and_report_commands_say_what_the_text_says() -> None:
    parsed = [parse(command) for command in commands_of("doctor")]
    asked = [(args[0].device, args[0].plan_scale) for args in parsed]
    assert {("t4", False), ("a100", True), ("a100", False)} < {*asked}
    (stage,) = [args[1].stage for args in parsed if isinstance(args[1], GeneratorArguments)]
    assert stage == "auto"
    assert [parse(command) for command in commands_of("report")] == [["outputs/affinity"]]


def test_the_flags_of_the_page_on_memory_are_those_of_the_doctor() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    types = (DoctorArguments, AffinityArguments, DataArguments, FastTrainingArguments)
    flags = set(re.findall(r"(--[a-z_0-9]+)", page)) - {"--device", "--config", "--tower_training"}
    known = {f"--{action.dest}" for action in FastArgumentParser(types, presets=PRESETS)._actions}
    assert len(flags) >= 14
    assert flags <= known


def test_phases_of_the_page_on_progressions_are_arguments_of_their_recipe() -> None:
    commands = read_commands(ROOT / "docs" / "progression.md")
    assert len(commands) == 2
    for command in commands:
        shared = command.partition(" -- ")[2]
        args = parse(command)[0]
        phases = read_progression(args.progression).phases
        words = [*shlex.split(shared), *(word for phase in phases for word in as_flags(phase.arguments))]
        assert parse(" ".join([args.recipe, *map(shlex.quote, words), "--use_cpu", "true"]))


def test_the_loading_example_names_what_there_is() -> None:
    (example,) = [block for block in read_snippets(ROOT / "docs" / "hub.md") if "predictor" in block]
    assert re.findall(r"AffinityPredictor\.(\w+)|predictor\.(\w+)\(", example) == [
        ("from_pretrained", ""),
        ("", "predict"),
    ]
    assert all(hasattr(AffinityPredictor, name) for name in ("from_pretrained", "predict"))


def tokenised(tokenizer: Any, labels: list[Any], text: str = "sequence") -> Dataset:
    """As users map their text: rows of unequal length, not padded, with the text still beside them."""
    rng = random.Random(0)
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(8, 30))) for _ in labels]
    data = Dataset.from_dict({text: rows, "label": labels})
    return data.map(lambda row: tokenizer(row[text]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_the_library_example_runs_as_printed_on_rows_that_are_tokenised_and_no_more(
    kind: str, demo_encoders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (example,) = read_snippets(ROOT / "docs" / "library.md")
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(demo_encoders[1])
    labels = [i / 10 for i in range(24)] if kind == "regression" else [i % 3 for i in range(24)]
    model = AutoModelForSequenceClassification.from_pretrained(
        demo_encoders[1], num_labels=1 if kind == "regression" else 3
    )
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given = {"model": model, "tokenizer": tokenizer}
    given["train"] = given["valid"] = tokenised(tokenizer, labels)
    exec(example, given)
    assert "packing identical applied" in " ".join(capsys.readouterr().out.split())
    state = given["trainer"].state
    assert (state.global_step, state.epoch) == (9, 3.0)  # 24 rows in batches of 8, 3 epochs: Trainer's defaults
    assert any(not torch.equal(weight.cpu(), before[name]) for name, weight in model.named_parameters())
    assert math.isfinite(given["trainer"].evaluate()["eval_loss"])
    # The innocent case and its broken twin: without the tokenizer Trainer cannot pad these rows, and fails.
    broken = example.replace(", processing_class=tokenizer", "")
    assert broken != example
    with pytest.raises(ValueError, match="expected sequence of length"):
        exec(broken, given)


def test_the_ten_lines_train_and_predict_on_a_table_of_ones_own(
    demo_encoders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (example,) = read_snippets(ROOT / "README.md")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(8, 30))) for _ in range(40)]
    lines = [f"{row},{row.count('A') / len(row):.3f}" for row in rows]
    (tmp_path / "data.csv").write_text("\n".join(["sequence,y", *lines]) + "\n")
    given: dict[str, Any] = {}
    exec(with_encoder(example, demo_encoders[1]), given)
    assert (given["trainer"].state.global_step, len(given["rows"]["test"])) == (15, 4)  # 36 rows, 3 epochs of 5 batches
    printed = re.findall(r"-?\d\.\d+(?:e-\d+)?", capsys.readouterr().out.rpartition("[[")[2])
    assert len(printed) == 4
    (tmp_path / "data.csv").write_text("protein,y\nACD,1\nACE,2\n")
    with pytest.raises(KeyError, match="sequence"):  # the broken twin: a table without that column
        exec(with_encoder(example, demo_encoders[1]), {})


def with_encoder(example: str, folder: str) -> str:
    """The example with an encoder that is on this machine in place of one of the Hub's."""
    there = example.replace('"facebook/esm2_t12_35M_UR50D"', repr(folder))
    assert there != example
    return there


def launches(text: str) -> list[str]:
    """The commands in a text that launch one of the recipes, or `your_script.py`."""
    return re.findall(r"accelerate launch [^`\n]*?(?:recipes/\w+\.py|your_script\.py)", text)


def test_every_launch_that_is_shown_ends_in_our_message_where_it_fails() -> None:
    """Of one process; with several, the launcher's own report ends in it."""
    single = [path for path in (ROOT / "accelerate_configs").glob("*.yaml") if "num_processes: 1\n" in path.read_text()]
    shown = [*single, ROOT / "README.md", *DOCS, ROOT / "recipes" / "max_speed.py", ROOT / "recipes" / "mlm.py"]
    found = [command for path in shown for command in launches(path.read_text(encoding="utf-8"))]
    assert len(single) == 4
    assert len(found) >= 21
    one_process = [command for command in found if not re.search(r"accelerate_configs/(?!1gpu)\d", command)]
    assert [command for command in one_process if "--quiet" not in command] == []
    assert launches("pip x && accelerate launch recipes/mlm.py --a b") == ["accelerate launch recipes/mlm.py"]


def test_every_preset_is_in_the_table_and_named_in_the_readme() -> None:
    table = (ROOT / "docs" / "speedups.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"| `{name}` |" not in table] == []
    assert [name for name in PRESETS if not re.search(rf"`(?:--preset )?{name}`", README)] == []


def named_paths(text: str) -> list[str]:
    """Files and folders of the project that a text names, in code or in a link; placeholders in capitals left out."""
    made = {"outputs", "data", "encoders", "build", "dist"}  # by runs and by users
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    top = "|".join(sorted(folders - made))
    found = re.findall(rf"(?:^|[\s`(])((?:{top})/[\w./-]*|[A-Z]+\.md)(?=[\s`),:;]|$)", text, re.MULTILINE)
    return [path for path in dict.fromkeys(found) if not re.search(r"\b[A-Z]+\.(py|yaml)$|\.\.\.$", path)]


def missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    ("names", "least"), [(["README.md"], 15), (["CONTRIBUTING.md"], 40), ([f"docs/{path.name}" for path in DOCS], 100)]
)
def test_every_path_that_is_named_exists(names: list[str], least: int) -> None:
    found = [path for name in names for path in named_paths((ROOT / name).read_text(encoding="utf-8"))]
    assert len({*found}) > least
    assert [path for path in missing(found) if path != "benchmarks/results/gpu_session.json"] == []  # of a card


def test_a_path_that_is_not_there_is_seen() -> None:
    text = "See `hf_ext/plan.py`, hf_ext/nowhere.py and [this](NOTHING.md); `hf_ext/speedups/NAME.py` is yours."
    assert named_paths(text) == ["hf_ext/plan.py", "hf_ext/nowhere.py", "NOTHING.md"]
    assert missing(named_paths(text)) == ["hf_ext/nowhere.py", "NOTHING.md"]


def test_the_marks_that_contributing_tells_to_run_are_those_of_pytest() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    marks = set(re.findall(r'^    "(\w+)[:(]', settings, re.MULTILINE))
    assert marks == {"nightly", "sampled", "gpu"}
    assert all(f"`{mark}" in CONTRIBUTING for mark in marks)
    assert "(CONTRIBUTING.md)" in README
