"""The pages of docs/ and the README can be followed: each command parses, each flag, file, link and anchor exists."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from documented_commands import (
    DOCS,
    README,
    ROOT,
    SUBCOMMANDS,
    find_recipe,
    known_flags,
    parse,
    read_commands,
    read_flags,
    read_snippets,
)

from hf_ext.errors import ArgumentError

PAGES = [README, *DOCS]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "accelerate_configs" / "README.md"]
COMMANDS = [(page.name, command) for page in PAGES for command in read_commands(page)]
RECIPES = [(page, command) for page, command in COMMANDS if find_recipe(command)]
OTHERS = [(page, command) for page, command in COMMANDS if not find_recipe(command)]
LAUNCHERS = {"config_file", "main_process_port", "quiet", "help", "num_processes", "multi_gpu", "mixed_precision"}
LAUNCHERS |= {"offload_optimizer_device"}
WRITTEN = {"benchmarks/results/gpu_session.json"}  # by whoever has a card
# Of recipes that parse by hand, of benchmarks, and of other people's programs.
ELSEWHERE = {"merge", "rename", "drop", "convert", "run", "size", "parts", "minutes", "force", "index", "keep", "max"}
ELSEWHERE |= {"singles", "timed_by"}  # of benchmarks/progression.py
SCHEDULERS = {"path", "grace_s", "nproc_per_node", "signal", "requeue", "env", "flavor", "timeout", "attempts", "dry"}
RELEASES = {"exit", "tags", "notes"}
PROGRAMS = {"pip", "sphinx-build", "pytest", "sbatch", "sky", "hf", "kubectl", "git", "gh", "grep", "cd", "NIGHTLY=1"}


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_commands_of_every_kind() -> None:
    assert len(RECIPES) >= 35
    assert {find_recipe(command) for _, command in RECIPES} == {*SUBCOMMANDS.values(), "pde_operator"}
    assert len({page for page, _ in RECIPES}) >= 13


@pytest.mark.parametrize(("page", "command"), RECIPES)
def test_a_command_parses(page: str, command: str) -> None:
    assert parse(command)


def test_a_command_that_would_be_refused_is_seen() -> None:
    for command in (
        "recipes/max_speed.py --no_such_flag 1",
        "recipes/doctor.py --config recipes/configs/absent.yaml",
        "hf-ext train --no_such_flag 1",
        "recipes/compare.py --recipe recipes/mlm.py -- --encoders x",
    ):
        with pytest.raises((ArgumentError, SystemExit, ValueError)):
            parse(command)


@pytest.mark.parametrize(("page", "command"), OTHERS)
def test_a_command_of_another_program_names_what_there_is(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "python" and words[1] != "-m":
        scripts = [ROOT / words[1], *(ROOT / "benchmarks" / "gpu").glob("*.py")]
        sources = "".join(script.read_text(encoding="utf-8") for script in scripts)
        flags = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in sources]
        assert {flag[2:] for flag in flags} <= known_flags() | ELSEWHERE | {
            "exit-code"
        }  # those that a launcher hands on; git's
    else:
        assert words[0] in {"python", *PROGRAMS}
    for word in words:
        if re.match(r"(recipes|launch|accelerate_configs|benchmarks)/[\w/]+\.\w+$", word):
            assert (ROOT / word).exists(), word


def test_every_snippet_compiles() -> None:
    snippets = [(page, snippet) for page in PAGES for snippet in read_snippets(page)]
    assert len(snippets) >= 3  # those with a trainer are run in test_readme.py
    for _, snippet in snippets:
        ast.parse(snippet)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_and_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    flags = read_flags(page)
    assert flags - LAUNCHERS - ELSEWHERE - SCHEDULERS - RELEASES - known_flags() == set()
    for name in re.findall(r"(?:recipes|accelerate_configs|benchmarks|docs)/[\w/]+\.(?:py|yaml|md|json)", text):
        assert (ROOT / name).exists() or name in WRITTEN or "NAME" in name, name


# --- links -----------------------------------------------------------------------------------------------------------


def read_links(text: str) -> list[tuple[str, str]]:
    """(file, anchor) of each relative link outside of code; either may be ""."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", text)
    return [(file, anchor) for file, anchor in found if "://" not in file]


def read_anchors(path: Path) -> set[str]:
    """Names of a page's headings, as code hosts and the generator of the pages make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page's text that lead nowhere."""
    wrong = []
    for file, anchor in read_links(text):
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in read_anchors(target)):
            wrong.append(f"{path.name}: {file}#{anchor}")
    return wrong


def test_every_link_and_anchor_leads_somewhere() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in LINKED}
    assert sum(len(read_links(text)) for text in texts.values()) >= 100
    assert [wrong for page, text in texts.items() for wrong in broken_links(page, text)] == []


def test_no_page_is_without_a_way_to_it() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = {page.stem for page in DOCS} - {"index"}
    listed = [word for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for word in block.split()]
    assert names - {*listed} == set()
    in_text = {Path(file).stem for file, _ in read_links(index)}
    assert names - in_text == set()
    from_readme = {file for file, _ in read_links(README.read_text(encoding="utf-8"))}
    assert {"docs/index.md", "docs/start.md"} <= from_readme
