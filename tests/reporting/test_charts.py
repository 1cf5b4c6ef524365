"""Charts: what is drawn is read back from the figure; a PNG is a file, an SVG text in the page's colours."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from page_checks import Page
from report_runs import log_history

from hf_ext.errors import DataError
from hf_ext.reporting import plot_loss, plot_scatter
from hf_ext.reporting.charts import VARIABLES, Chart, curve_charts, scatter_chart

pytestmark = pytest.mark.internals
HOSTILE = "</title><script>alert(1)</script>&$x^2$\n\"'"
LOG: list[dict[str, float]] = [
    {"loss": 3.0, "step": 10},
    {"loss": 2.0, "step": 20},
    {"eval_loss": 2.5, "step": 20, "eval_spearman": 0.5},
    {"eval_new_antigens_loss": 4.0, "step": 20},
    {"loss": 1.5, "step": 20},  # a resumed run: the later one counts
    {"eval_loss": 2.25, "step": 30, "eval_spearman": 0.4, "eval_token_loss": 9.0},
    {"train_loss": 2.2, "train_runtime": 1.0, "step": 30},
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that was saved, still complete; the file is written as well."""
    saved: list[Figure] = []
    original = Figure.savefig

    def keep(self: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def random_chart(num_rows: int = 60, label: str = "pKd") -> Chart:
    labels, errors = np.random.default_rng(0).normal(size=(2, num_rows))
    chart = scatter_chart(labels, labels + errors, label)
    assert chart is not None
    return chart


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines_by_name(figure: Figure) -> dict[str, Any]:
    """The lines of a chart by what its legend calls them, without the values that stand behind a name."""
    found = {str(line.get_label()).split(" (")[0]: line for line in figure.axes[0].lines}
    return {name: found[name] for name in (text.split(" (")[0] for text in legend(figure))}


def test_a_loss_plot_draws_every_curve_and_names_its_lowest_evaluation(tmp_path, figures) -> None:
    path = plot_loss(LOG, tmp_path / "new" / "loss.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    drawn = {name: line.get_xydata().tolist() for name, line in lines_by_name(figures[0]).items()}
    assert drawn == {
        "training": [[10, 3.0], [20, 1.5]],
        "validation": [[20, 2.5], [30, 2.25]],
        "new_antigens": [[20, 4.0]],
    }
    assert legend(figures[0])[1] == "validation (lowest: 2.25 at step 30)"


def test_full_passes_have_a_line_of_their_own_and_the_best_model_is_marked() -> None:
    loss, metric = curve_charts(log_history(), {"step": 200, "spearman": 0.765})
    assert [*lines_by_name(loss.figure)] == ["training", "validation", "all rows"]
    lines = lines_by_name(metric.figure)
    assert [*lines] == ["validation", "all rows", "best"]
    assert [*lines["best"].get_xdata()] == [200, 200]
    assert "is that of step 200" in metric.caption
    # Validation has one colour in both, with a training curve beside it or without.
    assert lines["validation"].get_color() == lines_by_name(loss.figure)["validation"].get_color()


def test_a_wide_range_of_losses_is_drawn_on_a_log_scale_and_a_narrow_one_is_not(tmp_path, figures) -> None:
    for top in (31.0, 29.0):
        plot_loss([{"loss": top, "step": 1}, {"loss": 1.0, "step": 2}], tmp_path / "loss.png")
    assert [figure.axes[0].get_yscale() for figure in figures] == ["log", "linear"]


def test_losses_that_are_not_finite_are_left_out(tmp_path, figures) -> None:
    plot_loss([{"loss": math.nan, "step": 1}, {"loss": 1.0, "step": 2}], tmp_path / "loss.png")
    assert figures[0].axes[0].lines[0].get_xydata().tolist() == [[2.0, 1.0]]


def test_a_long_curve_is_drawn_in_400_points_and_one_value_is_none() -> None:
    (chart,) = curve_charts([{"step": step, "loss": step % 2} for step in range(20_000)], {})
    assert lines_by_name(chart.figure)["training"].get_ydata().tolist() == [0.5] * 400
    assert curve_charts([{"step": 1, "loss": 1.0}], {}) == []


def test_a_log_without_a_loss_or_a_step_is_refused(tmp_path) -> None:
    for log in ([], [{"train_loss": 1.0, "step": 1}], [{"loss": math.nan, "step": 1}], [{"loss": 1.0}]):
        with pytest.raises(DataError, match="no finite 'loss'"):
            plot_loss(log, tmp_path / "loss.png")


def test_a_scatter_draws_measured_across_and_predicted_up_on_equal_axes(tmp_path, figures) -> None:
    plot_scatter([[1.0], [2.0], [math.nan]], np.array([5.0, 6.0, 7.0]), tmp_path / "s.png", "Test", "RMSE 4.0")
    axes = figures[0].axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[5.0, 1.0], [6.0, 2.0]]
    assert axes.get_xlim() == axes.get_ylim() == pytest.approx((0.8, 6.2))
    assert (axes.get_aspect(), axes.get_xlabel(), axes.get_ylabel()) == (1.0, "measured pKd", "predicted pKd")
    assert axes.texts[0].get_text() == "RMSE 4.0\nn = 2 (1 not finite, not drawn)"
    plot_scatter([6.0, 6.0], [6.0, 6.0], tmp_path / "s.png")
    assert figures[1].axes[0].get_xlim() == (5.5, 6.5)  # equal values get a range, too
    for predicted, measured, message in (
        ([1.0], [1.0, 2.0], "1 predictions for 2 references"),
        ([math.nan], [1.0], "none of the 1 rows"),
    ):
        with pytest.raises(DataError, match=message):
            plot_scatter(predicted, measured, tmp_path / "s.png")


def test_more_than_1500_rows_are_drawn_as_density_that_holds_every_row() -> None:
    dense, dots = random_chart(1501), random_chart(1500)
    counts = dense.figure.axes[0].collections[0].get_array()
    assert (counts.sum(), counts.min() >= 1) == (1501, True)
    assert f"1,501 test rows in cells, stronger in colour with more rows (at most {int(counts.max())})" in dense.caption
    assert len(dots.figure.axes[0].collections[0].get_offsets()) == 1500


def test_charts_stand_in_one_page_in_its_colours_and_load_nothing() -> None:
    def draw() -> list[str]:
        return [chart.svg() for chart in (random_chart(60), random_chart(3000), *curve_charts(log_history(), {}))]

    drawings = draw()
    assert drawings == draw()
    assert Page("".join(drawings)).problems == []
    for svg in drawings:
        ElementTree.fromstring(svg)  # well-formed
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(VARIABLES.values())
        assert not re.search(r"#[0-9a-f]{6}\b(?!\d)|\bnan\b|<image", re.sub(r"#\w{11}\b", "", svg))


def test_names_stay_text_in_an_svg() -> None:
    svg = random_chart(label=HOSTILE).svg()
    assert Page(svg).problems == []
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert any(HOSTILE.split("\n")[0] in str(text) for text in texts)  # and no mathematics


def test_plots_change_no_setting_and_do_not_import_pyplot(tmp_path) -> None:
    before = dict(matplotlib.rcParams)
    plot_loss(LOG, tmp_path / "loss.png")
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys; from hf_ext.reporting import plot_scatter; "
        f"plot_scatter([1.0], [2.0], {str(tmp_path / 'own.png')!r}); print('matplotlib.pyplot' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
