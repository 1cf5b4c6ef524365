"""Files that come with hf_ext are found by name, wherever one stands; one's own of that name goes first."""

from pathlib import Path

import pytest

from hf_ext.arguments.config_file import read_config
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
