"""The table of accelerate_configs/README.md is what its generator writes, and the generator's sums are right."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "accelerate_configs"
README = (FOLDER / "README.md").read_text(encoding="ascii")


@pytest.fixture(scope="module")
def config_table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import config_table
    finally:
        sys.path.pop(0)
    return config_table


def test_the_readme_holds_the_generated_table_with_a_row_for_each_of_nineteen_files(config_table):
    assert config_table.render(README) == README
    assert config_table.render(README.replace("12.0 / 12.6", "1.0 / 1.0")) == README  # edited by hand: put right
    rows = [line for line in README.splitlines() if line.startswith("| [`")]
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert {row.split("`")[1] for row in rows} == files
    assert len(rows) == len(files) == 19
