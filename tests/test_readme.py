"""The README and CONTRIBUTING.md say what is true: tables come from results, and what they name is there."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import chains
import pytest
import torch
from datasets import Dataset
from evaluate_recipe import EvaluateArguments
from tables import PAGES, render
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.affinity.scoring import known_scores
from hf_ext.comparing.arguments import CompareArguments
from hf_ext.comparing.progression_file import as_flags, read_progression
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.evaluation.requirements import parse_requirements
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.sample_arguments import SampleArguments
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.parser import FastArgumentParser
from hf_ext.plan import padding_share
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


def test_tables_are_what_the_results_say() -> None:
    names = ["devices.md", "gpu.md", "memory.md", "pde.md", "progression.md", "troubleshooting.md"]
    assert [path.name for path in PAGES] == ["README.md", *names]
    for path in PAGES:
        assert render(path.read_text(encoding="utf-8")) == path.read_text(encoding="utf-8")
    assert render(README.replace("x |", "y |")) == README  # a table edited by hand would be put right


def test_there_are_twenty_one_commands_and_their_files_exist() -> None:
    assert len(COMMANDS) == 21
    for command in COMMANDS:
        for word in shlex.split(command):
            if word.startswith(("recipes/", "accelerate_configs/")):
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("command", [command for command in COMMANDS if "recipes/max_speed.py" in command])
def test_training_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.partition("recipes/max_speed.py")[2])
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments), presets=PRESETS)
    assert len(parser.parse_args_into_dataclasses(arguments)) == 3


def test_the_masked_lm_command_parses() -> None:
    (command,) = [command for command in COMMANDS if command.startswith("accelerate launch --quiet recipes/mlm.py")]
    parser = FastArgumentParser((MaskedLMArguments, DataArguments, FastTrainingArguments), presets=PRESETS)
    assert len(parser.parse_args_into_dataclasses(shlex.split(command.partition("recipes/mlm.py")[2]))) == 3


def test_the_command_of_a_progression_parses_and_reads_its_phases() -> None:
    (command,) = [command for command in COMMANDS if "--progression" in command]
    words = shlex.split(command.partition("recipes/compare.py")[2])
    parser = HfArgumentParser(CompareArguments)
    (args,) = parser.parse_args_into_dataclasses(words[: words.index("--")], look_for_args_file=False)
    assert len(read_progression(str(ROOT / args.progression)).phases) == 8


def test_the_commands_of_the_generator_parse() -> None:
    (training,) = [command for command in COMMANDS if "recipes/generate_antibody.py" in command]
    types = (GeneratorArguments, DataArguments, FastTrainingArguments)
    words = shlex.split(training.partition("recipes/generate_antibody.py")[2])
    assert len(FastArgumentParser(types, presets=PRESETS).parse_args_into_dataclasses(words)) == 3
    (sampling,) = [command for command in COMMANDS if "recipes/sample.py" in command]
    words = shlex.split(sampling.partition("recipes/sample.py")[2])
    (args,) = FastArgumentParser((SampleArguments,), presets=PRESETS).parse_args_into_dataclasses(words)
    assert (args.decoding.num_samples, args.model) == (100, "outputs/generator")


def test_the_commands_that_evaluate_models_parse_and_so_does_what_they_require() -> None:
    lines = [command.partition("recipes/evaluate.py")[2] for command in COMMANDS if "recipes/evaluate.py" in command]
    parser = FastArgumentParser((EvaluateArguments, DataArguments, FastTrainingArguments), presets=PRESETS)
    rows, run = (parser.parse_args_into_dataclasses(shlex.split(line))[0] for line in lines)
    assert (len(rows.models), run.test_of) == (2, "outputs/affinity")
    assert len(parse_requirements(rows.require, known_scores(rows.binder_threshold, None))) == 3


def test_the_comparison_commands_parse_and_so_does_what_they_hand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [command for command in COMMANDS if "recipes/compare.py" in command and "--baseline" in command]
    tasks = (MaskedLMArguments, AffinityArguments)
    baselines = []
    for command, task in zip(commands, tasks, strict=True):
        words = shlex.split(command.partition("recipes/compare.py")[2])
        own, shared = words[: words.index("--")], words[words.index("--") + 1 :]
        (args,) = HfArgumentParser(CompareArguments).parse_args_into_dataclasses(own)
        baselines.append(args.baseline)
        parser = FastArgumentParser((task, DataArguments, FastTrainingArguments), presets=PRESETS)
        assert len(parser.parse_args_into_dataclasses(shared)) == 3
    best = [f"recipes/configs/mlm_stock_best{name}.yaml" for name in ("", "_float32")]
    assert baselines == [["stock", *best], ["row_by_row"]]


def test_the_comparison_command_is_that_of_its_table_on_chains_as_long_as_its_own(tmp_path: Path) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "compare_mlm_8M_cpu.json").read_text())
    measured = dict(read_flags(result["arguments"]))
    command = next(line for line in COMMANDS if "recipes/compare.py" in line and "chains.csv" in line)
    own, _, shared = command.partition("recipes/compare.py")[2].partition(" -- ")
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


def test_the_checkpoint_commands_parse() -> None:
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from resume_check import parse_arguments
    finally:
        sys.path.pop(0)
    commands = [command.partition("recipes/resume_check.py")[2] for command in COMMANDS if "resume_check" in command]
    folder, conversion = (parse_arguments(shlex.split(command, comments=True)) for command in commands)
    assert folder.folder == "outputs/affinity"
    assert conversion.rename == [("regressor.", "head.layers.")]


def test_the_doctor_and_report_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [command.partition("doctor.py")[2] for command in COMMANDS if "recipes/doctor.py" in command]
    parser = FastArgumentParser(
        (DoctorArguments, AffinityArguments, DataArguments, FastTrainingArguments), presets=PRESETS
    )
    (stages,) = [line for line in lines if "--stage" in line]
    given = [shlex.split(line, comments=True) for line in lines if line != stages]
    one, several = (parser.parse_args_into_dataclasses(words)[0] for words in given)
    assert (one.device, one.plan_scale, several.device, several.plan_scale) == ("t4", False, "a100", True)
    generator = (DoctorArguments, GeneratorArguments, DataArguments, FastTrainingArguments)
    parsed = FastArgumentParser(generator, presets=PRESETS).parse_args_into_dataclasses(
        shlex.split(stages, comments=True)
    )
    assert (parsed[0].device, parsed[1].stage) == ("a100", "auto")
    (report,) = [command for command in COMMANDS if "recipes/report.py" in command]
    assert report.endswith("--run outputs/affinity")


def test_the_commands_and_flags_of_the_page_on_memory_are_there() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\n(.*?)\n```", page)
    types = (DoctorArguments, AffinityArguments, DataArguments, FastTrainingArguments)
    parser = FastArgumentParser(types, presets=PRESETS)
    words = shlex.split(command.partition("recipes/doctor.py")[2])
    words[words.index("--config") + 1] = str(ROOT / words[words.index("--config") + 1])
    assert parser.parse_args_into_dataclasses(words)[0].device == "t4"
    flags = set(re.findall(r"(--[a-z_0-9]+)", page)) - {"--device", "--config", "--tower_training"}
    known = {f"--{name}" for action in parser._actions for name in [action.dest]}
    assert len(flags) >= 14
    assert flags <= known
    for script in re.findall(r"`(benchmarks/\w+\.py)`", page):
        assert (ROOT / script).exists(), script


def test_the_commands_of_the_page_on_progressions_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "progression.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in shell_lines(block)]
    assert len(commands) == 2
    monkeypatch.chdir(ROOT)
    for command in commands:
        own, _, shared = command.partition("recipes/compare.py")[2].partition(" -- ")
        (args,) = HfArgumentParser(CompareArguments).parse_args_into_dataclasses(shlex.split(own))
        phases = read_progression(args.progression).phases
        words = [*shlex.split(shared), *(word for phase in phases for word in as_flags(phase.arguments))]
        if args.recipe == "recipes/max_speed.py":
            parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments), presets=PRESETS)
            assert len(parser.parse_args_into_dataclasses([*words, "--use_cpu", "true"])) == 3


def shell_lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_loading_example_names_what_there_is() -> None:
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "predictor" in block]
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


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_the_library_example_runs_as_printed_on_rows_that_are_tokenised_and_no_more(
    kind: str, demo_encoders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "FastTrainer(" in block]
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


def launches(text: str) -> list[str]:
    """The commands in a text that launch one of the recipes, or `your_script.py`."""
    return re.findall(r"accelerate launch [^`\n]*?(?:recipes/\w+\.py|your_script\.py)", text)


def test_every_launch_that_is_shown_ends_in_our_message_where_it_fails() -> None:
    """Of one process; with several, the launcher's own report ends in it."""
    single = [path for path in (ROOT / "accelerate_configs").glob("*.yaml") if "num_processes: 1\n" in path.read_text()]
    shown = [*single, ROOT / "README.md", ROOT / "recipes" / "max_speed.py", ROOT / "recipes" / "mlm.py"]
    found = [command for path in shown for command in launches(path.read_text(encoding="utf-8"))]
    assert (len(single), len(found)) == (4, 15)
    assert [command for command in found if "--quiet" not in command] == []
    assert launches("pip x && accelerate launch recipes/mlm.py --a b") == ["accelerate launch recipes/mlm.py"]


def test_every_preset_is_in_the_table() -> None:
    assert all(f"| `{name}` |" in README for name in PRESETS)


def named_paths(text: str) -> list[str]:
    """Files and folders of the project that a text names, in code or in a link; placeholders in capitals left out."""
    top = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
    found = re.findall(rf"(?:^|[\s`(])((?:{top})/[\w./-]*|[A-Z]+\.md)(?=[\s`),:;]|$)", text, re.MULTILINE)
    return [path for path in dict.fromkeys(found) if not re.search(r"\b[A-Z]+\.(py|yaml)$", path)]


def missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_path_that_is_named_exists(text: str) -> None:
    assert len(named_paths(text)) > 40
    assert missing(named_paths(text)) == []


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
