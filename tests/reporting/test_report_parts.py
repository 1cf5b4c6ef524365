"""The parts that reports are made of: numbers as text, axes and marks, learning curves, Markdown that stays text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from report_runs import log_history

from hf_ext.reporting.report import values
from hf_ext.reporting.report.blocks import Bullets, Code, Command, Fold, Paragraph, Report, Section, Table
from hf_ext.reporting.report.curves import collect_curves, curve_figures
from hf_ext.reporting.report.figures import group_figure, prediction_figures
from hf_ext.reporting.report.html import figures_together
from hf_ext.reporting.report.markdown import render_markdown
from hf_ext.reporting.report.run_files import Predictions
from hf_ext.reporting.report.svg import HEX_RADIUS, Plot, Scale, tick_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (values.number(26000), "26,000"),
        (values.number(30.0), "30"),
        (values.number(0.81943), "0.819"),
        (values.number(None), "not measured"),
        (values.number(True), "yes"),
        (values.number(131, "residues"), "131 residues"),
        (values.number(None, "residues"), "not measured"),
        (values.seconds(0.341), "0.341 s"),
        (values.seconds(754.2), "12 min 34 s"),
        (values.seconds(7200), "2 h"),
        (values.seconds(11520), "3 h 12 min"),
        (values.seconds(187200), "2 d 4 h"),
        (values.seconds(float("nan")), "not measured"),
        (values.share(0.366), "36.6 %"),
        (values.gib(1.2549), "1.25 GiB"),
        (values.rate(187770.0, "residues"), "187,770 residues / s"),
        (values.rate(12.5, "residues"), "12.500 residues / s"),
        (values.dollars(0.0875), "$0.09"),
        (values.dollars(0.00158), "$0.0016"),
        (values.dollars(1234.5), "$1,234.50"),
        (values.dollars(None), "not measured"),
    ],
)
def test_numbers_have_sensible_digits_and_units(text, expected) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ({"value": 0.87654, "low": 0.85, "high": 0.9}, "0.877 [0.850, 0.900]"),
        ({"value": -0.0009, "low": -0.019, "high": -0.0001}, "-0.001 [-0.019, 0.000]"),
        ({"value": 0.00002, "low": 0.00001, "high": 0.00003}, "2.00e-05 [1.00e-05, 3.00e-05]"),
        ({"value": 2100.4, "low": 2000.0, "high": 2200.0}, "2,100 [2,000, 2,200]"),
        ({"value": 0.5, "low": None, "high": None}, "0.500"),
        ({"value": None, "low": 0.1, "high": 0.2}, "undefined"),
        ({"value": float("nan")}, "undefined"),
        (None, "not measured"),
    ],
)
def test_a_score_has_its_interval_or_says_what_is_missing(score, expected) -> None:
    assert values.score(score) == expected


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
    assert values.shorten_paths(text) == expected


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10), ["0", "2", "4", "6", "8", "10"]),
        (Scale(-0.04, 0.31), ["0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"]),
        (Scale(5, 3000), ["500", "1,000", "1,500", "2,000", "2,500", "3,000"]),
        (Scale(0.05, 3, log=True), ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (Scale(0.001, 200, log=True), ["0.001", "0.01", "0.1", "1", "10", "100"]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(scale, ticks) -> None:
    assert [tick_text(value) for value in scale.ticks()] == ticks


def test_one_value_has_an_axis_with_room_on_both_sides() -> None:
    assert Scale.around([7.5]) == Scale(6.75, 8.25)
    assert Scale.around([0.0]) == Scale(-0.5, 0.5)
    assert Scale.around([4.0], log=True) == Scale(2.0, 8.0, True)


def test_points_land_where_the_axes_say() -> None:
    plot = Plot(Scale(0, 10), Scale(0, 1), "x", "y", width=400, height=300)
    (left, bottom), (right, top), outside, above = plot.points([0, 10, 20, 10], [0, 1, 0.5, 2])
    assert (right, top, bottom) == (388.0, 12.0, 258.0)
    assert outside == (right, (top + bottom) / 2)  # stays on the edge of the axes
    assert above == (right, top)
    assert left < 60


def test_every_point_lies_in_a_hexagon_and_every_hexagon_holds_one() -> None:
    random = np.random.default_rng(0)
    plot = Plot(Scale(-4, 4), Scale(-4, 4), "x", "y")
    xs, ys = random.normal(size=(2, 3000))
    most = plot.hexagons(xs, ys, 1)
    centres = np.array(re.findall(r"M(\d+) (\d+)m", " ".join(plot.marks)), float)
    away = np.array(plot.points(xs, ys))[:, None] - centres[None]
    distances = np.sqrt((away**2).sum(-1))
    assert distances.min(1).max() < HEX_RADIUS + 1  # centres are drawn to whole units
    nearest = np.bincount(distances.argmin(1), minlength=len(centres))
    assert nearest.min() >= 1  # none is drawn for nothing
    assert abs(int(nearest.max()) - most) < 0.2 * most


def test_curves_keep_training_the_subset_and_full_passes_apart() -> None:
    curves = collect_curves(log_history(), "loss")
    assert [(curve.name, curve.kind, len(curve.points)) for curve in curves] == [
        ("training", "train", 30),
        ("subset", "eval", 6),
        ("all rows", "full", 2),
    ]
    assert collect_curves(log_history(), "spearman")[1].points == {200.0: 0.765, 300.0: pytest.approx(0.79 - 5 / 300)}


def test_curves_of_several_sets_bear_their_names_and_token_loss_is_no_loss() -> None:
    log = [{"step": 1, "eval_a_loss": 1.0, "eval_full_a_loss": 2.0, "eval_token_loss": 9.0}]
    assert [(curve.name, curve.points) for curve in collect_curves(log, "loss")] == [
        ("a, subset", {1.0: 1.0}),
        ("a, all rows", {1.0: 2.0}),
    ]
    assert [curve.points for curve in collect_curves(log, "token_loss")] == [{1.0: 9.0}]


def test_a_step_logged_twice_counts_once_and_what_is_not_finite_is_left_out() -> None:
    log = [{"step": 5, "loss": 3.0}, {"step": 5, "loss": 2.0}, {"step": 6, "loss": float("inf")}, {"loss": 1.0}]
    assert collect_curves(log, "loss")[0].points == {5.0: 2.0}


def test_the_best_model_is_marked_on_the_full_pass_and_an_early_stop_by_name() -> None:
    results = {"best": {"step": 200, "spearman": 0.765}, "early_stopping": {"stopped_at_step": 300}}
    loss, metric = curve_figures(log_history(), results)
    assert "is that of step 200 (spearman 0.765)" in metric.caption
    assert metric.svg.count('class="ring s3"') == 2  # legend and mark, in the colour of full passes
    assert 'class="thin s1"' in loss.svg
    for figure in (loss, metric):  # the subset has one colour in both, with a training curve beside it or without
        assert 'class="line s2"' in figure.svg
    assert "ring" not in loss.svg
    assert loss.svg.count(">stopped early</text>") == metric.svg.count(">stopped early</text>") == 1


def test_a_long_curve_is_drawn_as_means_of_400_windows() -> None:
    log = [{"step": step, "loss": step % 2} for step in range(20_000)]
    (figure,) = curve_figures(log, {})
    assert "means of 400 windows" in figure.caption
    assert len(figure.svg) < 12_000
    assert collect_curves(log, "loss")[0].points[1.0] == 1.0


def test_one_logged_value_is_no_curve() -> None:
    assert curve_figures([{"step": 1, "loss": 1.0}], {}) == []


def test_residuals_above_zero_are_labels_above_their_predictions() -> None:
    figures = prediction_figures(Predictions(np.array([3.0, 1.0]), np.array([1.0, 2.0])), "pKd")
    residuals = figures[1].svg
    zero = float(re.findall(r'class="dash s2" d="M[\d.]+ ([\d.]+)', residuals)[0])
    high, low = [float(y) for y in re.findall(r'class="faint s1" cx="[\d.]+" cy="([\d.]+)"', residuals)]
    assert high < zero < low  # down is more in an SVG


def test_calibration_shows_the_mean_label_of_each_part_of_the_rows() -> None:
    predictions = np.repeat([1.0, 2.0, 3.0], 20)
    labels = predictions * 2
    figures = prediction_figures(Predictions(labels, predictions), "pKd")
    calibration = next(figure for figure in figures if "Calibration" in figure.caption)
    assert "rows in 3 parts" in calibration.caption
    ends = re.findall(r'<circle class="dot s1" cx="([\d.]+)" cy="([\d.]+)"', calibration.svg)
    (x1, y1), (x2, y2), (x3, y3) = [(float(x), float(y)) for x, y in ends[:3]]  # the legend comes last
    box = Plot(Scale(0, 1), Scale(0, 1), "", "")
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    # Twice as steep as the identity, whose axes have one range.
    assert (y1 - y3) / (box.height - 54 - 36) > 1.5 * (x3 - x1) / (box.width - 12 - box.left)


def test_few_groups_are_named_and_many_are_drawn_by_size() -> None:
    def group(value, n=5):
        return {"value": value, "n": n, "undefined": None}

    few = group_figure({"a": group(0.5), "b": group(None)}, "Spearman")
    assert few is not None
    assert ">a (5)</text>" in few.svg
    many = group_figure({f"g{i}": group(i / 40, i + 1) for i in range(40)}, "Spearman")
    assert many is not None
    assert many.caption.startswith("Spearman of 40 groups by size.")
    assert group_figure({"b": group(None)}, "Spearman") is None


def test_figures_that_follow_each_other_stand_together() -> None:
    figures = prediction_figures(Predictions(np.arange(3.0), np.arange(3.0)), "y")
    groups = figures_together([Paragraph("a"), *figures, Paragraph("b")])
    assert [len(group) for group in groups] == [1, 2, 1]


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
