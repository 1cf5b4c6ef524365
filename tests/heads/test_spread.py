"""The spread of each prediction: by hand, calibrated on rows not seen, and the widths of intervals that follow it."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_ext.evaluation import ResamplingGroups
from hf_ext.heads import fit_spread, half_width, mix_spreads, scales_help, score_spread
from hf_ext.models import FEATURES, HeadEnsemble


def planted(num_rows: int, slope: float, seed: int = 0):
    """How far members are apart (n,), and normal residuals whose variance is 0.04 + `slope` times that."""
    generator = np.random.default_rng(seed)
    apart = generator.exponential(1.0, num_rows)
    return apart, generator.normal(size=num_rows) * np.sqrt(0.04 + slope * apart)


def test_members_are_as_far_apart_as_worked_out_by_hand():
    ensemble = HeadEnsemble([1], [0], [{"view": FEATURES, "number": 1, "sizes": []} for _ in range(2)])
    ensemble.shares.copy_(torch.tensor([0.25, 0.75]))
    for stack, weight in zip(ensemble.networks, (2.0, 6.0)):
        stack.weights[0].fill_(weight)
        stack.biases[0].zero_()
    mean, apart = ensemble.mix(torch.tensor([[1.0], [-2.0], [0.0]]))
    assert mean.tolist() == [5.0, -10.0, 0.0]
    assert apart.tolist() == [0.25 * 9 + 0.75 * 1, 0.25 * 36 + 0.75 * 4, 0.0]
    torch.testing.assert_close(ensemble(torch.tensor([[1.0]])), mean[:1])


def test_the_variance_that_was_planted_is_found_and_none_where_members_know_nothing():
    found = fit_spread(*planted(20_000, 1.0))
    assert (found["noise"], found["slope"]) == (pytest.approx(0.04, abs=0.02), pytest.approx(1.0, abs=0.05))
    apart, residuals = planted(20_000, 0.0)
    flat = fit_spread(apart, residuals)
    assert flat["slope"] * apart.mean() < 0.05 * flat["noise"]
    assert flat["noise"] == pytest.approx(0.04, rel=0.05)
    assert fit_spread(np.zeros(9), np.full(9, 2.0)) == {"noise": pytest.approx(4.0), "slope": 0.0}


def test_calibrated_deviations_hold_what_they_say_and_those_of_one_width_do_not():
    apart, residuals = planted(4000, 1.0, seed=1)
    fitted = fit_spread(*planted(4000, 1.0))
    rows = Dataset.from_dict({"label": residuals})  # without bounds
    facts = score_spread(np.sqrt(fitted["noise"] + fitted["slope"] * apart), residuals, rows)
    assert facts["calibration_error"] < 0.02
    assert facts["spearman"] > 0.3
    assert facts["std"] == pytest.approx(facts["rmse"], rel=0.1)
    flat = score_spread(np.full(4000, residuals.std()), residuals, rows)
    assert flat["calibration_error"] > 2 * facts["calibration_error"]
    assert flat["spearman"] is None
    assert "It is the same for all rows" in flat["notes"][0]


def test_intervals_scale_where_that_is_shown_to_help_and_only_there():
    apart, residuals = planted(1000, 1.0)
    scales = np.sqrt(0.04 + apart)
    assert scales_help(residuals, scales)
    assert not scales_help(residuals, scales[::-1])  # of other rows
    assert not scales_help(planted(1000, 0.0)[1], scales)  # errors that are alike everywhere
    assert not scales_help(residuals[:15], scales[:15])  # too few to show it
    clusters = ResamplingGroups.of("clone", np.arange(1000) // 500)
    assert not scales_help(residuals, scales, clusters)  # two units


def test_half_widths_follow_the_row_only_where_that_is_stored():
    stored = {"levels": [0.9], "half_widths": [2.0], "num_rows": 30}
    stds = np.array([0.5, 1.0])
    assert half_width(stored, 0.9, stds) == 2.0  # as models of earlier versions have it
    assert half_width({**stored, "times_std": True}, 0.9, stds).tolist() == [1.0, 2.0]


def test_several_models_are_mixed_by_their_variances_and_the_variance_of_their_means():
    means, stds = np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 4.0]])
    std = mix_spreads(means, stds)
    assert mix_spreads(means, [stds[0], None]) is None
    assert std.tolist() == pytest.approx([np.sqrt(1 + 1), np.sqrt(10 + 0)])
