"""Charts: what is drawn is read back from the figure; the SVG of a figure holds it all, in the page's colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from report_runs import log_history

from hf_ext.reporting.charts.curves import Moments, collect_curves, curve_chart, curve_charts
from hf_ext.reporting.charts.look import LOG_RATIO, VARIABLES, Chart, new_figure, plain_name, set_range
from hf_ext.reporting.charts.rows import group_chart, length_chart, prediction_charts

HOSTILE = "</title><script>alert(1)</script>&$x^2$\n\"'"


def random_charts(num_rows: int = 60, label: str = "pKd") -> list[Chart]:
    labels, errors = np.random.default_rng(0).normal(size=(2, num_rows))
    return prediction_charts(labels, labels + errors, label)


def lines_by_name(chart: Chart) -> dict[str, Any]:
    """The lines of a chart by what its legend calls them, without the values that stand behind a name."""
    legend = chart.figure.legends[0]
    names = [text.get_text().split(" (")[0] for text in legend.get_texts()]
    found = {str(line.get_label()).split(" (")[0]: line for line in chart.figure.axes[0].lines}
    return {name: found[name] for name in names}


def texts(chart: Chart) -> list[str]:
    return [str(element.text) for element in ElementTree.fromstring(chart.svg()).iter("text")]


# Learning curves


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
    (curve,) = collect_curves(log, "loss")
    assert (curve.points, curve.left_out) == ({5.0: 2.0}, {6.0})


def test_the_best_model_is_marked_on_the_full_pass_and_an_early_stop_by_name() -> None:
    results = {"best": {"step": 200, "spearman": 0.765}, "early_stopping": {"stopped_at_step": 300}}
    loss, metric = curve_charts(log_history(), results)
    assert "is that of step 200 (spearman 0.765)" in metric.caption
    ring = lines_by_name(metric)["best"]
    assert ring.get_xydata().tolist() == [[200, 0.765]]
    assert ring.get_color() == lines_by_name(metric)["all rows"].get_color()
    assert "best" not in lines_by_name(loss)
    # The subset has one colour in both, with a training curve beside it or without.
    assert lines_by_name(metric)["subset"].get_color() == lines_by_name(loss)["subset"].get_color()
    for chart in (loss, metric):
        assert [text.strip() for text in texts(chart)].count("stopped early") == 1


def test_the_best_value_of_each_evaluation_is_named() -> None:
    legends = [[text.get_text() for text in chart.figure.legends[0].get_texts()] for chart in curve_charts(LOG, {})]
    assert legends == [
        ["training", "validation (lowest: 1 at step 20)"],
        ["validation (highest: 0.9 at step 30)"],
    ]


LOG: list[dict[str, float]] = [
    {"step": 10, "loss": 2.0, "eval_loss": 2.0, "eval_spearman": 0.5},
    {"step": 20, "eval_loss": 1.0, "eval_spearman": 0.7},
    {"step": 30, "loss": 1.5, "eval_loss": 1.5, "eval_spearman": 0.9},
]


def test_marks_beyond_the_logged_steps_stand_on_the_edge() -> None:
    chart = curve_chart("loss", collect_curves(LOG, "loss"), LOG, Moments(stopped=1000.0, alarms=(-5.0,)))
    low, high = chart.figure.axes[0].get_xlim()
    marks = [line.get_xdata()[0] for line in chart.figure.axes[0].lines if line.get_linestyle() == ":"]
    assert marks == [high, low]


def test_a_long_curve_is_drawn_as_means_of_400_windows() -> None:
    log = [{"step": step, "loss": step % 2} for step in range(20_000)]
    (chart,) = curve_charts(log, {})
    assert "means of 400 windows" in chart.caption
    assert len(chart.svg()) < 12_000
    assert collect_curves(log, "loss")[0].points[1.0] == 1.0


def test_one_logged_value_is_no_curve() -> None:
    assert curve_charts([{"step": 1, "loss": 1.0}], {}) == []


@pytest.mark.parametrize("ratio", [LOG_RATIO - 1, LOG_RATIO + 1])
def test_ticks_are_round_numbers_within_the_axis(ratio: float) -> None:
    (chart,) = curve_charts([{"step": 100, "loss": ratio}, {"step": 200, "loss": 1.0}], {})
    chart.svg()
    axes = chart.figure.axes[0]
    low, high = axes.get_ylim()
    ticks = [value for value in axes.get_yticks() if low <= value <= high]
    assert ticks == ([0, 5, 10, 15, 20, 25, 30] if ratio < LOG_RATIO else [1, 2, 5, 10, 20])


# Rows


def test_residuals_above_zero_are_labels_above_their_predictions() -> None:
    residuals = prediction_charts(np.array([3.0, 1.0]), np.array([1.0, 2.0]), "pKd")[1]
    assert residuals.figure.axes[0].collections[0].get_offsets().tolist() == [[1.0, 2.0], [2.0, -1.0]]


def test_calibration_shows_the_mean_label_of_each_part_of_the_rows() -> None:
    predictions = np.repeat([1.0, 2.0, 3.0], 20)
    charts = prediction_charts(predictions * 2, predictions, "pKd")
    calibration = next(chart for chart in charts if "Calibration" in chart.caption)
    assert "rows in 3 parts" in calibration.caption
    means = calibration.figure.axes[0].lines[1]
    assert means.get_xydata().tolist() == [[1, 2], [2, 4], [3, 6]]


def test_every_row_of_many_lies_in_a_cell() -> None:
    chart = random_charts(3000)[0]
    counts = chart.figure.axes[0].collections[0].get_array()
    assert counts.sum() == 3000
    assert counts.min() >= 1  # none is drawn for nothing
    assert f"3,000 test rows in cells, stronger in colour with more rows (at most {int(counts.max())})" in chart.caption


def test_a_histogram_holds_every_row() -> None:
    bars, outline = random_charts(200)[3].figure.axes[0].patches
    assert bars.get_data().values.sum() == outline.get_data().values.sum() == 200


def test_lengths_that_do_not_vary_are_not_drawn() -> None:
    columns = {"heavy": ["ACD", "ACDEF"], "light": ["AC", "AC"]}
    assert length_chart(columns, ["light"]) is None
    chart = length_chart(columns, ["heavy", "light", "absent"])
    assert chart is not None
    assert "heavy: 3 to 5; light: 2 to 2" in chart.caption


def test_few_groups_are_named_and_many_are_drawn_by_size() -> None:
    def group(value, n=5):
        return {"value": value, "n": n, "undefined": None}

    few = group_chart({"a": group(0.5), "b": group(None)}, "Spearman")
    assert few is not None
    assert "a (5)" in texts(few)
    many = group_chart({f"g{i}": group(i / 40, i + 1) for i in range(40)}, "Spearman")
    assert many is not None
    assert many.caption.startswith("Spearman of 40 groups by size.")
    assert {"1", "2", "5", "10", "20"} <= set(texts(many))
    assert group_chart({"b": group(None)}, "Spearman") is None


def test_equal_values_have_an_axis_with_room_on_both_sides() -> None:
    _, (axes,) = new_figure(("x", "y"))
    set_range(axes, [7.5, 7.5], [0.0, 10.0])
    assert (axes.get_xlim(), axes.get_ylim()) == ((7.0, 8.0), (-0.4, 10.4))


# As SVG


def test_a_mark_lands_in_the_svg_where_the_axes_say() -> None:
    figure, (axes,) = new_figure(("x", "y"), width=400, height=300)
    figure.set_layout_engine("none")
    axes.set_position((0.1, 0.2, 0.5, 0.4))  # of the figure: left, bottom, width, height
    axes.set(xlim=(0, 10), ylim=(0, 1))
    axes.plot([5, 10], [0.25, 1.0], "o")
    axes.plot([0, 10], [0, 1], "D", markersize=2, markeredgewidth=0)
    svg = Chart(figure, "x", "").svg()
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg) == [("140.0", "210.0"), ("240.0", "120.0")]
    assert 'viewBox="0 0 400 300"' in svg
    (diamonds,) = re.findall(r"<g [^>]*>((?:<path[^>]*>)+)</g>", svg)
    starts = re.findall(r'd="M([\d.]+) ([\d.]+)l', diamonds)
    assert [(float(x), round(float(y), -1)) for x, y in starts] == [(40, 240), (240, 120)]


@pytest.mark.parametrize("num_rows", [60, 3000])
def test_an_svg_has_the_colours_of_the_page_and_refers_to_nothing(num_rows: int) -> None:
    charts = [*random_charts(num_rows), *curve_charts(log_history(), {"alarms": [{"step": 10}]})]
    assert len(charts) == 6
    for chart in charts:
        svg = chart.svg()
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(VARIABLES.values())
        assert not re.search(r"#|url|href|\bid=|<use|<script|<image|<!|\bnan\b", svg)
        assert {element.tag for element in ElementTree.fromstring(svg).iter()} <= {
            *("svg", "title", "path", "g", "circle", "text")
        }


def test_names_stay_text_in_an_svg() -> None:
    plain, hostile = random_charts(), random_charts(label=HOSTILE)
    for one, other in zip(plain, hostile):
        tree = ElementTree.fromstring(other.svg())
        tags = [[element.tag for element in drawn.iter()] for drawn in (ElementTree.fromstring(one.svg()), tree)]
        assert set(tags[0]) == set(tags[1])
        assert (
            tree.get("aria-label") == tree.findtext("title") == " ".join(other.alt.split("\n")) or HOSTILE in other.alt
        )
    assert any(HOSTILE.split("\n")[0] in text for text in texts(hostile[0]))  # and no mathematics


def test_two_charts_of_the_same_rows_are_the_same_text() -> None:
    assert [chart.svg() for chart in random_charts(2000)] == [chart.svg() for chart in random_charts(2000)]


def test_1500_rows_are_dots_of_40_bytes() -> None:
    svg = random_charts(1500)[0].svg()
    assert svg.count("<circle") == 1500
    assert len(svg) < 70_000


def test_a_long_name_is_cut_and_a_broken_one_is_on_one_line() -> None:
    assert plain_name("two\nlines") == "two lines"
    assert plain_name("x" * 41) == "x" * 38 + ".."
    assert plain_name("x" * 40) == "x" * 40
