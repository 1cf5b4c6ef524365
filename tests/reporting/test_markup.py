"""Names that hold markup stand in card and report as they are: rendered, they add no tag, link, heading or column."""

from __future__ import annotations

import copy
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import affinity_results, write_run
from test_card import COMMIT, RECORD

from hf_ext.reporting.card import write_card
from hf_ext.reporting.report import write_report

markdown_it = pytest.importorskip("markdown_it")

PAYLOADS = (
    "heavy<img src=x onerror=alert(1)>",
    "a`<img src=x>`b",
    "``<img src=x>",
    "\\`<img src=x>\\",
    "](http://evil) ![x",
    "[x](http://evil)",
    "[x]: http://evil",
    "<http://evil>",
    "a | b | c",
    "\\| b",
    "# heading",
    "two\n\n# headings\n<img src=x>",
    "```\n<img src=x>\n```",
    "~~~\n<img src=x>",
    "<!-- <img src=x>",
    "</details><img src=x>",
    '"]}\n```\n<img src=x>',
    "&lt;b&gt;&#60;b>",
    "**bold** _it_ <b>",
    "---",
    "=cmd|'/C calc'!A0",
)


class _Tags(HTMLParser):
    """Counts of tags, and where links and images lead."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        renderer = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
        self.html = renderer.render(markdown.removeprefix("---\n").partition("\n---\n")[2] or markdown)
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("href", "src")]


def hostile_record(name: str) -> dict[str, Any]:
    """The record of a run with `name` wherever a user's own words stand."""
    record = copy.deepcopy(RECORD)
    for tower in record["model"]["towers"]:
        tower["inputs"] = [[name]]
    record["model"]["towers"][1]["encoder"] = f"/home/ann/{name}"
    record["verdict"]["text"] = name
    record["test"]["notes"] = [name]
    record["test"]["slices"][0]["name"] = name
    record["test"]["collapse"]["alarms"] = [name]
    record["labels"]["train"]["alarms"] = [name]
    data = record["data"]
    data |= {"filter": name, "split": {"rule": f"group:{name}", "seed": 1}, "source": f"/home/ann/{name}"}
    data["leaks"]["columns"] = {name: data["leaks"]["columns"]["heavy"], "light": data["leaks"]["columns"]["light"]}
    data["inputs"] = {name: {"longest": 127, "num_above_limit": 3}}
    record["settings"] |= {"label_column": name, "sequence_columns": [name]}
    record["settings_from"] |= {"label_column": "command line", "sequence_columns": f"{name}.yaml"}
    record["command"] = shlex.join(["python", "recipes/max_speed.py", "--label_column", name])
    return record


def render_card(folder: Path, record: dict[str, Any]) -> _Tags:
    folder.mkdir(parents=True)
    (folder / "all_results.json").write_text(json.dumps(record))
    return _Tags(write_card(folder).read_text())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_name_of_the_user_adds_no_markup_to_the_card(tmp_path: Path, name: str) -> None:
    plain = render_card(tmp_path / "plain" / "run", hostile_record("heavy"))
    card = render_card(tmp_path / "hostile" / "run", hostile_record(name))
    assert card.tags == plain.tags
    assert card.targets == plain.targets
    assert plain.tags.count("table") >= 3


def test_no_page_drives_the_terminal_that_shows_it(tmp_path: Path) -> None:
    name = "a\x1b]0;title\x07\x9b2J\x7f"
    card_folder, run_folder = tmp_path / "card" / "run", tmp_path / "report"
    render_card(card_folder, hostile_record(name))
    data = {"filter": name, "split": {"rule": f"group:{name}", "seed": 1}, "source": "x", "inputs": {name: {}}}
    pages = write_report(write_run(run_folder, affinity_results(data=data, command=name)))
    for page in (card_folder / "README.md", *pages):
        text = page.read_text()
        assert "title" in text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), page


def test_a_model_named_like_a_link_is_linked_by_its_quoted_name(tmp_path: Path) -> None:
    record = hostile_record("heavy")
    record["model"]["towers"][0] |= {"encoder": "x](http://evil)<img src=x>", "revision": COMMIT}
    card = render_card(tmp_path / "run", record)
    assert "img" not in card.tags
    assert "http://evil" not in card.targets


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_name_of_the_user_adds_no_markup_to_the_report(tmp_path: Path, name: str) -> None:
    def render(word: str) -> _Tags:
        data = {"filter": word, "split": {"rule": f"group:{word}", "seed": 1}, "source": "x", "inputs": {word: {}}}
        settings = {"label_column": word, "group_column": word}
        results = affinity_results(data=data, settings=settings, settings_from=dict.fromkeys(settings, word))
        folder = tmp_path / str(word == name)
        _, markdown = write_report(write_run(folder, results | {"command": f"python x.py --label_column {word}"}))
        return _Tags(markdown.read_text())

    plain, report = render("heavy"), render(name)
    assert report.tags == plain.tags
    assert report.targets == plain.targets
