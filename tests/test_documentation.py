"""All pages say what is true: tables come from results, commands parse, examples run, what is named exists."""

import ast
import math
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from documented_commands import (
    DOCS,
    PAGES,
    README,
    ROOT,
    all_commands,
    find_recipe,
    known_flags,
    parse,
    read_commands,
    read_snippets,
)
from figures import FIGURES
from tables import ENTRIES, TABLES, render
from tables import PAGES as WITH_TABLES
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_ext
from hf_ext.arguments import PRESETS
from hf_ext.cli import COMMANDS
from hf_ext.errors import ArgumentError, HfExtError

CONTRIBUTING, CONFIGS = ROOT / "CONTRIBUTING.md", ROOT / "accelerate_configs" / "README.md"
TEXTS = {page: page.read_text(encoding="utf-8") for page in (*PAGES, CONTRIBUTING, ROOT / "CHANGELOG.md", CONFIGS)}
WRITTEN = {"benchmarks/results/gpu_session_CARD.json"}  # by whoever has a card
# Flags of other people's programs and of benchmarks.
ELSEWHERE = {"config_file", "num_processes", "main_process_port", "quiet", "nproc_per_node"}
ELSEWHERE |= {"size", "parts", "minutes", "dry-run", "path", "env", "flavor", "timeout", "attempts", "version"}
ELSEWHERE |= {"image", "disk", "onstart"}
PROGRAMS = {"pip", "sphinx-build", "pytest", "sbatch", "sky", "vastai", "hf", "kubectl", "python"}


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_tables_and_pictures_are_what_the_results_say() -> None:
    assert {*WITH_TABLES} == {*PAGES}
    shown = [name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", TEXTS[page])]
    assert sorted(shown) == sorted(TABLES)  # each stands once
    assert [page.name for page in PAGES if render(TEXTS[page]) != TEXTS[page]] == []
    assert render(TEXTS[README].replace("x |", "y |")) == TEXTS[README]  # a table edited by hand would be put right
    assert {path for path, draw in FIGURES.items() if path.read_text(encoding="ascii") != draw()} == set()
    pictures = [(page, *found) for page in PAGES for found in re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", TEXTS[page])]
    assert {page.parent / file for page, _, file in pictures} == {*FIGURES}
    for page, alternative, file in pictures:
        drawn = (page.parent / file).read_text(encoding="ascii")
        numbers = re.findall(r"\d\.\d\d", alternative)
        assert [number for number in numbers if f">{number}</text>" not in drawn] == []
        assert len(numbers) >= 3


def test_what_is_said_of_devices_and_of_trainer_names_tests_that_are_there() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    tests = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert {entry.test.partition("::")[2] for entry in ENTRIES} - tests == set()
    table = TEXTS[ROOT / "docs" / "library.md"].partition("## What differs from Trainer")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) == 44
    assert [row for row, names in zip(rows, named) if not names] == []
    assert {name for names in named for name in names} - tests == set()
    assert "test_" + "of_nothing" not in tests  # the broken twin


def test_every_preset_is_explained_and_every_exported_name_is_in_the_reference() -> None:
    assert [name for name in PRESETS if f"| `{name}` |" not in TEXTS[ROOT / "docs" / "memory.md"]] == []
    page = TEXTS[ROOT / "docs" / "api.md"]
    named = {*re.findall(r":: hf_ext\.(\w+)$", page, re.MULTILINE), *re.findall(r"`(\w+)`", page)}
    assert {*hf_ext.__all__} - named == set()
    assert [name for name in COMMANDS if f"| `hf-ext {name}` |" not in TEXTS[ROOT / "docs" / "cli.md"]] == []


def test_every_command_of_a_recipe_parses() -> None:
    commands = [command for _, command in all_commands() if find_recipe(command)]
    assert len(commands) >= 30
    assert {*COMMANDS} <= {find_recipe(command) for command in commands}
    refused = {}
    for command in commands:
        try:
            parse(command)
        except (HfExtError, ImportError, OSError, SystemExit) as error:
            refused[command] = str(error)
    assert refused == {}


@pytest.mark.parametrize(
    "command",
    [
        "recipes/max_speed.py --no_such_flag 1",
        "hf-ext doctor --config recipes/configs/absent.yaml",
        "hf-ext train --no_such_flag 1",
        "hf-ext compare --recipe recipes/mlm.py -- --encoders x",
    ],
)
def test_a_command_that_would_be_refused_is_seen(command: str) -> None:
    with pytest.raises((ArgumentError, SystemExit)):
        parse(command)


def test_commands_of_other_programs_name_what_there_is() -> None:
    for _, command in all_commands():
        words = shlex.split(command, comments=True)
        if find_recipe(command) is None:
            assert words[0] in PROGRAMS, command
        for word in words:
            if re.match(r"(recipes|launch|accelerate_configs|benchmarks)/[\w/]+\.\w+$", word):
                assert (ROOT / word).exists(), word


def test_every_flag_and_file_that_is_named_exists() -> None:
    known = known_flags() | ELSEWHERE | {"config"}
    for page in PAGES:
        flags = set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]+(?:-[a-z]+)*)", TEXTS[page]))
        scripts = re.findall(r"python (benchmarks/\w+\.py)", TEXTS[page])
        own = "".join((ROOT / script).read_text(encoding="utf-8") for script in scripts)
        assert {flag for flag in flags - known if f'"--{flag}"' not in own} == set(), page.name
    folders = "recipes|accelerate_configs|benchmarks|docs|hf_ext|tests|launch"
    for page, text in TEXTS.items():
        text = re.sub(r"<!-- table.*?<!-- end -->", "", text, flags=re.DOTALL)  # records of what was measured then
        for name in re.findall(rf"(?:^|[\s`(])((?:{folders})/[\w./-]*\w|[A-Z]+\.md)(?=[\s`),:;])", text):
            assert (ROOT / name).exists() or name in WRITTEN or "NAME" in name, f"{page.name}: {name}"


def test_one_process_is_launched_so_that_our_message_is_the_last_line() -> None:
    shown = [command for page in PAGES for command in re.findall(r"accelerate launch [^`\n]*\.py", TEXTS[page])]
    assert len(shown) >= 4
    assert [one for one in shown if "--quiet" not in one and "--num_processes" not in one] == []


def test_every_snippet_compiles() -> None:
    snippets = [snippet for page in PAGES for snippet in read_snippets(page)]
    assert len(snippets) >= 4
    for snippet in snippets:
        ast.parse(snippet)


def make_sequences(num_rows: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(8, 30))) for _ in range(num_rows)]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_the_example_of_the_library_trains_numbers_and_classes(
    num_labels: int, demo_encoders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example = read_snippets(ROOT / "docs" / "library.md")[0]
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(demo_encoders[1])
    labels: list[Any] = [i / 10 for i in range(24)] if num_labels == 1 else [i % 3 for i in range(24)]
    rows = Dataset.from_dict({"sequence": make_sequences(24), "label": labels})
    rows = rows.map(lambda row: tokenizer(row["sequence"]))
    model = AutoModelForSequenceClassification.from_pretrained(demo_encoders[1], num_labels=num_labels)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given = {"model": model, "tokenizer": tokenizer, "train": rows, "valid": rows}
    exec(example, given)
    printed = " ".join(capsys.readouterr().out.split())
    assert "packing identical" in printed
    assert not re.search("packing identical (skipped|off)", printed)
    assert given["trainer"].state.global_step == 9  # 24 rows in batches of 8, 3 epochs: Trainer's defaults
    assert any(not torch.equal(weight.cpu(), before[name]) for name, weight in model.named_parameters())
    assert math.isfinite(given["trainer"].evaluate()["eval_loss"])
    # The broken twin: without the tokenizer Trainer cannot pad these rows.
    broken = example.replace(", processing_class=tokenizer", "")
    assert broken != example
    with pytest.raises(ValueError, match="expected sequence of length"):
        exec(broken, given)


def test_the_example_of_the_readme_trains_and_predicts(
    demo_encoders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (printed,) = read_snippets(README)
    example = printed.replace('"facebook/esm2_t12_35M_UR50D"', repr(demo_encoders[1]))
    assert example != printed
    monkeypatch.chdir(tmp_path)
    lines = [f"{row},{row.count('A') / len(row):.3f}" for row in make_sequences(40)]
    Path("data.csv").write_text("\n".join(["sequence,y", *lines]) + "\n")
    given: dict[str, Any] = {}
    exec(example, given)
    assert (given["trainer"].state.global_step, len(given["rows"]["test"])) == (15, 4)  # 36 rows, 3 epochs of 5 batches
    assert len(re.findall(r"-?\d\.\d+(?:e-\d+)?", capsys.readouterr().out.rpartition("[[")[2])) == 4
    Path("data.csv").write_text("protein,y\nACD,1\nACE,2\n")
    with pytest.raises(KeyError, match="sequence"):  # the broken twin: a table without that column
        exec(example, {})


def test_every_link_and_anchor_leads_somewhere() -> None:
    wrong, num_links = [], 0
    for page, text in TEXTS.items():
        for file, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", without_code(text)):
            target = (page.parent / file).resolve() if file else page
            if "://" not in file:
                num_links += 1
                found = target.exists() and (not anchor or anchor in read_anchors(target))
                wrong += [] if found else [f"{page.name}: {file}#{anchor}"]
    assert wrong == []
    assert num_links >= 100


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def read_anchors(path: Path) -> set[str]:
    """Names of a page's headings, as code hosts and Sphinx make them."""
    headings = re.findall(r"^#{1,3} (.+)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = TEXTS[ROOT / "docs" / "index.md"]
    names = {page.stem for page in DOCS} - {"index"}
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    assert names <= {word for block in blocks for word in block.split()}
    assert names <= {*re.findall(r"\((\w+)\.md", index)}


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
def test_the_pages_build_with_every_flag_and_a_page_with_a_mistake_does_not(tmp_path: Path) -> None:
    done = build(ROOT / "docs", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    site = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert site.keys() >= {page.stem for page in DOCS} | {"search", "genindex"}
    assert all(f'id="hf_ext.{name}"' in site["api"] for name in ("FastTrainer", "AffinityPredictor"))
    assert all(f"--{flag}" in site["cli"] for flag in ("num_samples", "min_speedup", "convert"))
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (tmp_path / "index.md").write_text("# A\n\n[b](absent.md)\n")
    broken = build(tmp_path, tmp_path / "out")
    assert broken.returncode != 0
    assert "absent" in broken.stderr


def test_the_workflow_runs_the_scripts_that_people_run_and_the_citation_is_of_this_version() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="ascii"))
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == [".ci/run", ".ci/nightly ${{ matrix.versions }}"]
    assert all(os.access(ROOT / ".ci" / script, os.X_OK) for script in ("run", "nightly"))
    assert workflow["permissions"] == {"contents": "read"}
    checks = (ROOT / ".ci" / "run").read_text().splitlines()[-4:]
    assert checks == ["ruff check .", "ruff format --check .", "mypy", "pytest"]  # what fails quickly comes first
    assert 'pip install -e ".[dev]" && pytest' in read_commands(README)  # which both scripts look up there
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="ascii"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # which the format demands
    assert citation["version"] == hf_ext.__version__
    assert f"## {hf_ext.__version__} " in TEXTS[ROOT / "CHANGELOG.md"]


def test_a_release_is_tested_on_the_oldest_versions_that_are_allowed() -> None:
    lowest = dict(re.findall(r'"([a-z]+)>=([\d.]+)', (ROOT / "setup.py").read_text()))
    names = ("torch", "transformers", "accelerate", "datasets", "peft")
    oldest = " ".join(f"'{name}=={'.'.join((lowest[name] + '.0').split('.')[:2])}.*'" for name in names)
    assert f"NIGHTLY=1 .ci/nightly {oldest}\n" in TEXTS[CONTRIBUTING]
