"""The page of what was asked for has all 210 items, counts them right, and names what there is."""

import re
from collections import Counter

import pytest
from documented_commands import ROOT, known_flags
from test_documentation import ELSEWHERE

from hf_ext.cli import COMMANDS

PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="ascii")
STATES = ("yes", "described", "part", "no")
NUM_ITEMS = 210
FILES = r"(?<![\w./-])([\w./-]+\.(?:py|yaml|ipynb|sbatch|sh|csv|md))(?![\w/])"


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def find_problems(page: str) -> list[str]:
    rows = re.findall(r"^\| (\d+) \|.+\| (\w+) \|$", page, re.MULTILINE)
    states = Counter(state for _, state in rows)
    said = {state: int(number) for number, state in re.findall(r"(\d+) (?:are )?\*\*(\w+)\*\*", page)}
    found = [] if [int(number) for number, _ in rows] == [*range(1, NUM_ITEMS + 1)] else ["numbers"]
    found += [] if said == {state: states[state] for state in STATES} else ["counts"]
    code = "\n".join(re.findall(r"`([^`]+)`", page))
    flags = {*re.findall(r"--([a-z][a-z_0-9]+)", code)}
    found += sorted(flags - known_flags() - ELSEWHERE - {"config"})
    found += sorted({*re.findall(r"hf-ext (\w[\w-]*)", code)} - {*COMMANDS})
    files = {*re.findall(FILES, code)}
    named = {path.name for folder in ("recipes", "accelerate_configs") for path in (ROOT / folder).rglob("*.*")}
    return found + sorted(file for file in files if not (ROOT / file).is_file() and file not in named)


def test_the_items_are_all_there_counted_and_what_they_name_exists() -> None:
    assert find_problems(PAGE) == []
    assert len(re.findall(r"^## ", PAGE, re.MULTILINE)) == 5  # a heading for each document


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("| 7 | ", "| 8 | ", "numbers"),
        ("| 31 | ", "| 31 | more | yes |\n| 31 | ", "numbers"),
        (" | part |\n", " | yes |\n", "counts"),
        ("`--bf16 true`", "`--bf15 true`", "bf15"),
        ("`hf-ext evaluate`", "`hf-ext evaluated`", "evaluated"),
        ("`recipes/max_speed.py`", "`recipes/most_speed.py`", "recipes/most_speed.py"),
        ("`pde_optimized.yaml`", "`pde_best.yaml`", "pde_best.yaml"),
    ],
)
def test_a_page_that_is_wrong_in_one_place_is_seen(old: str, new: str, problem: str) -> None:
    assert old in PAGE
    assert problem in find_problems(PAGE.replace(old, new, 1))
