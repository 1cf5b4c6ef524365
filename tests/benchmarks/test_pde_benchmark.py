"""What both sides of the benchmark on Darcy flow share: the schedule, and symmetries that the equation has too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pde_darcy import schedule, turn_about

from hf_ext.pde.solvers import make_darcy, solve_darcy


def test_the_rate_warms_up_and_ends_at_0():
    found = [schedule(done) for done in (0.0, 0.025, 0.05, 0.525, 1.0)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_turned_samples_solve_the_equation():
    samples = [torch.from_numpy(found) for found in make_darcy(2, resolution=8, seed=0)]
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(60):
        inputs, targets = turn_about(*samples, generator)
        seen.add(inputs.numpy().tobytes())
        for a, u in zip(inputs.numpy(), targets.numpy()):
            assert np.allclose(solve_darcy(a), u, rtol=1e-5)
    assert len(seen) == 8
