"""Files that come with hf_ext are found by name, wherever one stands; one's own of that name goes first."""

from pathlib import Path

import pytest

from hf_ext.arguments.config_file import read_config
from hf_ext.comparing.arguments import CompareArguments
from hf_ext.comparing.launching import read_launch
from hf_ext.comparing.sides import make_command, make_sides
from hf_ext.errors import ArgumentError
from hf_ext.shipped import CONFIGS, LAUNCHERS, RECIPES, find_shipped, list_shipped, shipped_folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "folder"),
    [("gb1.yaml", CONFIGS), ("recipes/configs/gb1.yaml", CONFIGS), ("mlm.py", RECIPES), ("cpu.yaml", LAUNCHERS)],
)
def test_a_name_is_found_alone_and_as_in_a_clone(text, folder):
    found = find_shipped(text, folder)
    assert found.is_absolute()
    assert found == shipped_folder(folder) / Path(text).name
    assert found.is_file()


@pytest.mark.parametrize("text", ["gb2.yaml", "other/gb1.yaml", "/recipes/configs/gb1.yaml", "../gb1.yaml", "mlm.py"])
def test_anything_else_is_left_as_it_is(text):
    assert find_shipped(text, CONFIGS) == Path(text)


def test_a_path_that_exists_goes_first(tmp_path):
    (tmp_path / "gb1.yaml").write_text("learning_rate: 7\n")
    assert find_shipped("gb1.yaml", CONFIGS) == Path("gb1.yaml")
    assert read_config("gb1.yaml")["learning_rate"].where == "gb1.yaml line 1"
    (tmp_path / "gb1.yaml").unlink()
    assert "encoders" in read_config("gb1.yaml")


def test_an_unknown_config_lists_what_comes_along():
    with pytest.raises(
        ArgumentError, match=r"--config .gb2.yaml.: cannot be read from .* With hf_ext come: gb1.yaml, "
    ):
        read_config("gb2.yaml")
    assert len(list_shipped(CONFIGS)) >= 20


def test_a_comparison_finds_recipe_sides_and_launchers_outside_of_a_clone(tmp_path):
    args = CompareArguments(baseline=["mlm_stock_best.yaml"], recipe="recipes/mlm.py", config="mlm_esm2_8M.yaml")
    side, other = make_sides(args)
    command = make_command(args, [], side, tmp_path / "run", 0)
    assert command[1] == str(shipped_folder(RECIPES) / "mlm.py")
    merged = Path(command[command.index("--config") + 1]).read_text()
    assert "stock_trainer" in merged
    assert "max_residues" in merged
    alone = make_command(args, [], other, tmp_path / "run", 0)
    assert alone[alone.index("--config") + 1] == str(shipped_folder(CONFIGS) / "mlm_esm2_8M.yaml")
    assert read_launch("cpu.yaml", "baseline_launch").file == str(shipped_folder(LAUNCHERS) / "cpu.yaml")
    with pytest.raises(ArgumentError, match=r"stock_worst.yaml: no such file in"):
        make_sides(CompareArguments(baseline=["stock_worst.yaml"]))
