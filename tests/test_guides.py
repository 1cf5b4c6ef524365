"""The guides can be followed: each command parses, each flag and file exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented_commands import ROOT, SCRIPT, known_flags, parse, read_commands, read_flags

from hf_ext.errors import ArgumentError

GUIDES = [ROOT / "docs" / name for name in ("migration.md", "troubleshooting.md")]
COMMANDS = [(path.name, command) for path in GUIDES for command in read_commands(path)]
LAUNCHERS = {"config_file", "main_process_port", "quiet"}
OTHERS = {"merge", "rename", "drop", "convert", "model", "progression"}  # of resume_check.py and compare.py
OPERATORS = {"inverse_loss_every", "num_queries"}


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10
    assert {SCRIPT.search(command)[1] for _, command in COMMANDS} >= {"compare", "evaluate", "resume_check", "doctor"}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_parses(page: str, command: str) -> None:
    assert parse(command)


@pytest.mark.parametrize(
    "command", ["recipes/max_speed.py --no_such_flag 1", "recipes/doctor.py --config recipes/configs/absent.yaml"]
)
def test_a_command_that_would_be_refused_is_seen(command: str) -> None:
    with pytest.raises((ArgumentError, SystemExit, ValueError)):
        parse(command)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_every_flag_and_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert read_flags(page) - {"require", "models", "test_of"} <= known_flags() | LAUNCHERS | OTHERS | OPERATORS
    for name in re.findall(r"(?:recipes|accelerate_configs|benchmarks|docs)/[\w/]+\.(?:py|yaml|md)", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (page.parent / link).exists(), link
