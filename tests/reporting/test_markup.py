"""Names that hold markup stand in report and card as they are: rendered, they add no tag, link, heading or column."""

import copy
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_checks import Page
from report_runs import CUT, affinity_results, read_pages, write_run

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
    "{{ 7 * 7 }}{% raw %}",
)


class _Tags(HTMLParser):
    """Tags of a card as it is rendered, and where links and images lead."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.feed(markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("href", "src")]


def hostile_record(name: str) -> dict[str, Any]:
    """The record of a run with `name` wherever a user's own words stand."""
    record = copy.deepcopy(affinity_results(command=shlex.join(["hf-ext", "train", "--label_column", name])))
    for tower in record["model"]["towers"]:
        tower["inputs"] = [[name]]
    record["model"]["towers"][1]["encoder"] = f"/home/ann/{name}"
    record["verdict"]["text"] = name
    record["alarms"] = [{"step": 1, "name": name, "alarms": [name]}]
    record["advice"] = [name]
    test = record["test"]
    test["notes"], test["slices"][0]["name"], test["collapse"]["alarms"] = [name], name, [name]
    test["scores"]["model"]["per_group_spearman"]["groups"] = {name: {"value": 0.1, "n": 4, "undefined": name}}
    record["labels"]["train"]["alarms"] = [name]
    data = record["data"]
    data |= {"split": {"rule": f"group:{name}", "seed": 1}, "source": f"/home/ann/{name}"}
    data["leaks"]["columns"] = {name: data["leaks"]["columns"]["heavy"], "light": data["leaks"]["columns"]["antigen"]}
    data["inputs"] = {name: {"longest": 127, "cut": CUT}}
    record["settings"] |= {"label_column": [name], "sequence_columns": [name]}
    record["settings_from"] |= {"label_column": "command line", "sequence_columns": f"{name}.yaml"}
    return record


def test_a_name_of_the_user_adds_no_markup_to_either_page(tmp_path: Path) -> None:
    def read(number: int, name: str) -> tuple[Page, _Tags]:
        report, card = read_pages(write_run(tmp_path / str(number) / "run", hostile_record(name), num_rows=0, log=[]))
        return report, _Tags(card)

    report, plain = read(-1, "chain")
    assert plain.tags.count("table") >= 3
    for number, name in enumerate(PAYLOADS):
        hostile, card = read(number, name)
        assert (card.tags, card.targets) == (plain.tags, plain.targets), name
        assert (hostile.problems, hostile.tags) == ([], report.tags), name
    report, _ = read_pages(write_run(tmp_path / "figures", hostile_record(PAYLOADS[0]), num_rows=3))
    assert (report.problems, "img" in report.tags, "svg" in report.tags) == ([], False, True)
    assert "49" not in hostile.html.split("</h1>")[0].split("<h1>")[1]  # the last name is a template


def test_no_page_drives_the_terminal_that_shows_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, hostile_record("a\x1b]0;title\x07\x9b2J\x7f"))
    assert "title" in read_pages(folder)[1]
    for name in ("report.html", "README.md"):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", (folder / name).read_text()), name


def test_the_check_of_pages_sees_a_tag(tmp_path: Path) -> None:
    assert Page("<p><b>x</b></p>").tags == ["p", "b"]
    assert _Tags("[x](http://evil) <img src=x>").targets == ["http://evil", "x"]
