"""The README, docs/ and CONTRIBUTING.md say what is true: tables come from results, examples run, names are there."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import figures
import pytest
import torch
from datasets import Dataset
from documented_commands import DOCS, read_snippets
from tables import PAGES, TABLES, render
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_ext.arguments.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


def test_the_picture_is_what_its_result_says_and_so_are_the_numbers_beside_it() -> None:
    for path, draw in figures.FIGURES.items():
        assert path.read_text(encoding="ascii") == draw()
    ((alternative, file),) = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    drawn = (ROOT / file).read_text(encoding="ascii")
    numbers = re.findall(r"\d\.\d\d", alternative)
    assert len(numbers) == 5
    assert [number for number in numbers if f">{number}</text>" not in drawn] == []


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
    assert "packing identical" in " ".join(capsys.readouterr().out.split())
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
    assert len(found) >= 20
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
