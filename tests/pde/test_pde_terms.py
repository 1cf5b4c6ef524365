"""Auxiliary terms of an operator's loss: exact solutions have none, and they are due as often as asked for."""

from __future__ import annotations

import pytest
import torch
from operators import RESOLUTION, make_operator, make_samples

from hf_ext.pde.model import TaskStep
from hf_ext.pde.terms import AuxiliaryTerms, constant_along_characteristics, inverse_loss, ritz_energy


class Exact:
    """Stands in for a trained operator: decodes what it is given, wherever that lies on the grid."""

    def __init__(self, field: torch.Tensor, model):
        self.field, self.config, self.coordinates = field, model.config, model.coordinates

    def decode(self, task: str, latents: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        row = (queries[..., 0] * RESOLUTION).floor().long()
        column = (queries[..., 1] * RESOLUTION).floor().long()
        return self.field.flatten(1).take_along_dim(row * RESOLUTION + column, dim=1)


def all_points(num: int) -> torch.Tensor:
    """Every cell among the 5th ones, in their order."""
    return torch.arange(RESOLUTION**2).repeat_interleave(5).expand(num, -1)


@pytest.fixture(scope="module")
def darcy():
    samples = make_samples(3)["darcy2d"]
    model = make_operator()
    inputs, u = torch.from_numpy(samples["inputs"]), torch.from_numpy(samples["targets"])
    points = all_points(len(u))

    def energy(field: torch.Tensor) -> torch.Tensor:
        step = TaskStep(inputs, inputs, inputs, points, field.flatten(1))
        return ritz_energy(Exact(field, model), step)

    return energy, u, model


def test_the_solution_has_the_least_energy_of_all_fields(darcy):
    energy, u, _ = darcy
    least = energy(u)
    bump = torch.zeros_like(u)
    bump[:, 5, 9] = 0.1 * u.mean()
    noise = 0.05 * u.mean() * torch.randn(u.shape, generator=torch.Generator().manual_seed(0))
    for other in (0.9 * u, 1.1 * u, u + bump, u - bump, u + noise, u + 0.05 * u.mean(), torch.zeros_like(u)):
        assert (energy(other) > least).all()


def test_energy_is_flat_at_the_solution_alone(darcy):
    energy, u, _ = darcy
    for field, is_flat in ((u, True), (1.05 * u, False)):
        leaf = field.clone().requires_grad_()
        (slope,) = torch.autograd.grad(energy(leaf).sum(), leaf)
        assert (slope.abs().max() < 1e-3) == is_flat


def test_its_least_value_is_half_of_the_mean_solution(darcy):
    """By Green's identity the integral of a |grad u|^2 is that of u, where the source is 1."""
    energy, u, model = darcy
    expected = -0.5 * u.mean((1, 2)) / model.config.target_means["darcy2d"]
    assert torch.allclose(energy(u), expected, rtol=1e-3)


@pytest.mark.parametrize(("speed", "is_solution"), [(0.4, True), (0.5, False)])
def test_only_the_right_speed_is_constant_along_characteristics(speed, is_solution):
    model = make_operator()

    class Wave:
        config, coordinates = model.config, model.coordinates

        def decode(self, task, latents, queries):
            x, t = queries.unbind(-1)
            return torch.sin(2 * torch.pi * 3 * (x - speed * t))

    points = torch.arange(RESOLUTION**2)[None]
    wave = Wave()
    here = wave.decode("advection1d", None, model.coordinates("advection1d", points))
    initial = wave.decode("advection1d", None, torch.stack([torch.linspace(0, 1, 65)[:-1], torch.zeros(64)], -1))[None]
    found = constant_along_characteristics(wave, TaskStep(initial, initial, initial, points, here))
    assert (found < 1e-4).all() if is_solution else (found > 0.1).all()


def test_an_inverse_loss_is_0_where_inputs_are_read_back_exactly():
    class Reader:
        def __init__(self, factor):
            self.factor = factor

        def encode(self, task, inputs):
            return inputs.flatten(1)[..., None]

        def decode_inputs(self, task, latents, places):
            return self.factor * latents[..., 0].take_along_dim(places, dim=1)

    inputs = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)) + 1
    encoded = Reader(1.0).encode("darcy2d", inputs)
    points = torch.arange(64).expand(2, -1)
    step = TaskStep(inputs, encoded, encoded, points, inputs.flatten(1))
    assert inverse_loss(Reader(1.0), "darcy2d", step).tolist() == [0.0, 0.0]
    # A tenth too large everywhere: a tenth of error in what is read back, and a tenth in its encoding.
    assert inverse_loss(Reader(1.1), "darcy2d", step) == pytest.approx([0.2, 0.2], rel=1e-5)
    few = TaskStep(inputs, encoded, encoded, points[:, :16], inputs.flatten(1)[:, :16])
    assert (inverse_loss(Reader(1.1), "darcy2d", few) < 0.2).all()  # the rest of the grid stays as it was


def test_terms_are_due_in_every_nth_step_of_training_alone():
    model = make_operator()
    batch = {f"{task}_inputs": torch.from_numpy(found["inputs"]) for task, found in make_samples(2).items()}
    targets = [torch.from_numpy(found["targets"]).flatten(1) for found in make_samples(2).values()]
    batch["labels"] = torch.stack(targets, dim=1)

    def loss(step: int, training: bool, **given) -> float:
        model.terms = AuxiliaryTerms(**given)
        model.terms.schedule.taken = step
        return float(model.train(training)(**batch).loss.detach())

    plain = loss(0, True)
    assert [loss(step, True, inverse_every=3) > plain for step in range(5)] == [True, False, False, True, False]
    assert [loss(step, True, physics_every=2) != plain for step in range(4)] == [True, False, True, False]
    assert loss(0, False, inverse_every=1, physics_every=1) == pytest.approx(loss(0, False))
    assert loss(0, True, inverse_every=1, inverse_weight=0.0) == plain
    once, twice = (loss(0, True, inverse_every=1, inverse_weight=weight) - plain for weight in (0.1, 0.2))
    assert twice == pytest.approx(2 * once, rel=1e-3)
