"""The parts that reports are made of: paths without folders, figures side by side, Markdown that stays text."""

from __future__ import annotations

import numpy as np
import pytest

from hf_ext.reporting.charts import prediction_charts
from hf_ext.reporting.report.blocks import Bullets, Code, Command, Figure, Fold, Paragraph, Report, Section, Table
from hf_ext.reporting.report.html import figures_together
from hf_ext.reporting.report.markdown import render_markdown
from hf_ext.reporting.report.values import hide_folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/a/runs/first", ".../first"),
        ("--output_dir /tmp/x/y --seed 7", "--output_dir .../y --seed 7"),
        ("['/data/a.csv', '~/b/c.csv']", "['.../a.csv', '.../c.csv']"),
        ("C:\\Users\\a\\runs\\first", ".../first"),
        ("facebook/esm2_t6_8M_UR50D", "facebook/esm2_t6_8M_UR50D"),
        ("data/gb1.csv.gz and ../other/x.csv", "data/gb1.csv.gz and ../other/x.csv"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("1/2 residues / s", "1/2 residues / s"),
    ],
)
def test_only_absolute_paths_are_shortened(text, expected) -> None:
    assert hide_folders(text) == expected


def test_figures_that_follow_each_other_stand_together() -> None:
    figures = [Figure(chart) for chart in prediction_charts(np.arange(60.0), np.arange(60.0), "y")]
    groups = figures_together([Paragraph("a"), *figures, Paragraph("b")])
    assert [len(group) for group in groups] == [1, 3, 1]


def render(*blocks) -> list[str]:
    report = Report("t", "s", "v", None, sections=[Section("x", "X", blocks)])
    return render_markdown(report).split("## X\n\n")[1].strip().splitlines()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# no heading", "\\# no heading"),
        ("- no list", "\\- no list"),
        ("1. no list", "1\\. no list"),
        ("two\nlines", "two lines"),
        ("<b> & *bold* `code`", "&lt;b> &amp; \\*bold\\* \\`code\\`"),
        ("[a](http://b)", "[a]\\(http://b)"),
        ("snake_case and _this_", "snake_case and \\_this\\_"),
        ("0.8 [0.7, 0.9]", "0.8 [0.7, 0.9]"),
    ],
)
def test_text_stays_text_in_markdown(text, expected) -> None:
    assert render(Paragraph(text)) == [expected]
    assert render(Bullets([text])) == [f"- {expected}"]


def test_markdown_has_tables_folds_and_commands() -> None:
    table = Table(["a|b", "n"], [[Code("x`|y"), -1.5], [None, 2]], "Title")
    assert render(Fold("More", [table]), Command("do it")) == [
        "<details><summary>More</summary>",
        "",
        "Title",
        "",
        "| a\\|b         |      n |",
        "| ------------ | -----: |",
        "| ``x`\\|y``    | -1.500 |",
        "| not measured |      2 |",
        "",
        "</details>",
        "",
        "```",
        "do it",
        "```",
    ]
