"""Plots: what is drawn is read back from the figure; files are PNGs; nothing global in matplotlib moves."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_ext.errors import ArgumentError, DataError
from hf_ext.reporting import plot_loss, plot_scatter
from hf_ext.reporting.charts.curves import collect_curves
from hf_ext.reporting.charts.look import MAX_DOTS

LOG = [
    {"loss": 3.0, "step": 10, "epoch": 0.5, "grad_norm": 1.0},
    {"loss": 2.0, "step": 20, "epoch": 1.0},
    {"eval_loss": 2.5, "step": 20, "epoch": 1.0},
    {"eval_new_antigens_loss": 4.0, "step": 20, "epoch": 1.0},
    {"loss": 1.5, "step": 20, "epoch": 1.0},
    {"train_loss": 2.2, "train_runtime": 1.0, "step": 20, "epoch": 1.0},
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


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_losses_are_collected_by_name_with_one_point_per_step() -> None:
    assert {curve.name: curve.points for curve in collect_curves(LOG, "loss")} == {
        "training": {10: 3.0, 20: 1.5},  # step 20 was logged twice; the later one counts
        "new_antigens, validation": {20: 4.0},
        "validation": {20: 2.5},
    }


def test_loss_plot_draws_every_curve_and_epochs_along_the_top(tmp_path: Path, figures: list[Figure]) -> None:
    path = plot_loss(LOG, tmp_path / "new" / "loss.png", "A run")
    assert is_png(path)
    axes = figures[0].axes[0]
    lines = {str(line.get_label()).split(" (")[0]: list(line.get_ydata()) for line in axes.lines}
    assert lines == {"training": [3.0, 1.5], "validation": [2.5], "new_antigens, validation": [4.0]}
    assert axes.get_title(loc="left") == "A run"
    assert [child.get_xlabel() for child in axes.child_axes] == ["epoch"]
    assert axes.child_axes[0].get_xlim()[1] == pytest.approx(axes.get_xlim()[1] / 20)


def test_the_lowest_evaluation_loss_is_named(tmp_path: Path, figures: list[Figure]) -> None:
    log = [{"eval_loss": value, "step": step} for step, value in ((100, 0.9), (1200, 0.7146), (2000, 0.8))]
    plot_loss(log, tmp_path / "loss.png")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "validation (lowest: 0.7146 at step 1,200)"
    ]


def test_a_wide_range_of_losses_is_drawn_on_a_log_scale_and_a_narrow_one_is_not(
    tmp_path: Path, figures: list[Figure]
) -> None:
    for top in (31.0, 29.0):
        plot_loss([{"loss": top, "step": 1}, {"loss": 1.0, "step": 2}], tmp_path / "loss.png")
    assert [figure.axes[0].get_yscale() for figure in figures] == ["log", "linear"]


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path: Path, figures: list[Figure]) -> None:
    plot_loss([{"loss": math.nan, "step": 1}, {"loss": 1.0, "step": 2}], tmp_path / "loss.png")
    axes = figures[0].axes[0]
    assert list(axes.lines[0].get_ydata()) == [1.0]
    assert [text.get_text() for text in axes.texts] == ["1 values not finite, not drawn"]


@pytest.mark.parametrize("log", [[], [{"train_loss": 1.0, "step": 1}], [{"loss": math.nan, "step": 1}]])
def test_a_log_without_a_loss_is_refused(log: list[dict[str, float]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finite 'loss'"):
        plot_loss(log, tmp_path / "loss.png")


def test_a_log_entry_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"log_history\[0\]: 'loss' without 'step'"):
        plot_loss([{"loss": 1.0}], tmp_path / "loss.png")


def test_scatter_draws_measured_across_and_predicted_up_on_equal_axes(tmp_path: Path, figures: list[Figure]) -> None:
    path = plot_scatter([[1.0], [2.0], [math.nan]], np.array([5.0, 6.0, 7.0]), tmp_path / "s.png", "Test", "RMSE 4.0")
    assert is_png(path)
    axes = figures[0].axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[5.0, 1.0], [6.0, 2.0]]
    assert axes.get_xlim() == axes.get_ylim() == pytest.approx((0.8, 6.2))
    assert axes.get_aspect() == 1.0
    assert axes.lines[0].get_xydata()[:, 0].tolist() == axes.lines[0].get_xydata()[:, 1].tolist()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("measured pKd", "predicted pKd")
    assert axes.texts[0].get_text() == "RMSE 4.0\nn = 2 (1 not finite, not drawn)"


def test_more_than_1500_rows_are_drawn_as_density_that_holds_every_row(tmp_path: Path, figures: list[Figure]) -> None:
    values = np.random.default_rng(0).normal(8, 1, size=(2, 1501))
    plot_scatter(values[0], values[1], tmp_path / "dense.png")
    plot_scatter(values[0, :1500], values[1, :1500], tmp_path / "dots.png")
    assert figures[0].axes[0].collections[0].get_array().sum() == MAX_DOTS + 1 == 1501
    assert len(figures[0].axes) == 2  # the colour bar
    assert len(figures[1].axes[0].collections[0].get_offsets()) == 1500


def test_constant_values_still_get_a_range(tmp_path: Path, figures: list[Figure]) -> None:
    plot_scatter([6.0, 6.0], [6.0, 6.0], tmp_path / "s.png")
    assert figures[0].axes[0].get_xlim() == (5.5, 6.5)


def test_scatter_refuses_rows_it_cannot_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 predictions for 2 references"):
        plot_scatter([1.0], [1.0, 2.0], tmp_path / "s.png")
    with pytest.raises(DataError, match="none of the 1 rows"):
        plot_scatter([math.nan], [1.0], tmp_path / "s.png")


def test_plots_change_no_setting_and_do_not_import_pyplot(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_loss(LOG, tmp_path / "loss.png")
    plot_scatter([1.0, 2.0], [1.0, 2.0], tmp_path / "s.png")
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys; from hf_ext.reporting import plot_scatter; "
        f"plot_scatter([1.0], [2.0], {str(tmp_path / 'own.png')!r}); print('matplotlib.pyplot' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
