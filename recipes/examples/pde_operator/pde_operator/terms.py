"""What an operator's loss has beside the data: inverse losses, and what is known of the equations.

Each is taken at the points that the step decodes, so fewer queries make it cheaper, and in every n-th optimizer step.
Sources: inverse losses as in Universal Physics Transformers (arXiv:2402.12365), section 3.2, here on grids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from .configuration import ADVECTION_SPEED, ADVECTION_TIMES
from .model import TaskStep, relative_l2


class OptimizerStep(TrainerCallback):
    """Tells a model's forward the optimizer step: the terms read it, and the trainer has it as a callback.

    Attributes:
        taken: optimizer steps taken before the present one, also by the run that this one continues.
    """

    def __init__(self) -> None:
        self.taken = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepares the terms before the first micro-batch of a step."""
        self.taken = state.global_step


@dataclass
class AuxiliaryTerms:
    """Inverse losses and physics priors of a training step, for `OperatorTransformer.terms`.

    Give `schedule` to `trainer.add_callback`: it tells the model which optimizer step it is in.

    Attributes:
        inverse_every, physics_every: computed in every n-th optimizer step; 0 for never.
        inverse_weight, physics_weight: beside a weight of 1 for the data. A term is not scaled up for the steps in
            which it is left out.
    """

    inverse_every: int = 0
    inverse_weight: float = 0.1
    physics_every: int = 0
    physics_weight: float = 0.05
    schedule: OptimizerStep = field(default_factory=OptimizerStep)

    def __call__(self, model: Any, task: str, step: TaskStep) -> torch.Tensor | float:
        """What the terms of one task add to the loss of each row: (B,), float32; 0.0 where none is due."""
        total: torch.Tensor | float = 0.0
        if self.inverse_weight and self._is_due(self.inverse_every):
            total = total + self.inverse_weight * inverse_loss(model, task, step)
        if self.physics_weight and self._is_due(self.physics_every):
            total = total + self.physics_weight * PRIORS[task](model, step)
        return total

    def _is_due(self, every: int) -> bool:
        """Tells whether terms are due: in all micro-batches of a step and on all processes alike."""
        return every > 0 and self.schedule.taken % every == 0


def inverse_loss(model: Any, task: str, step: TaskStep) -> torch.Tensor:
    """Measures how badly encoded inputs can be read back, and how far that moves their encoding: (B,), float32.

    Inverse decoding: relative L2 between inputs and what `decode_inputs` makes of their encoding, at the step's points.
    Inverse encoding: relative L2 between the encoding and that of the inputs with these points put in; gradients reach
    the latter alone.

    Cost: decoding of Q points, or Q / 4 for advection, whose inputs have no time; and the encoder once more.
    """
    inputs = step.inputs.flatten(1)
    places = step.points if step.inputs.dim() == 3 else step.points[:, ::ADVECTION_TIMES] // ADVECTION_TIMES
    decoded = model.decode_inputs(task, step.encoded, places)
    rebuilt = inputs.scatter(1, places, decoded.to(inputs.dtype)).view_as(step.inputs)
    encoded = model.encode(task, rebuilt).flatten(1)
    decoding = relative_l2(decoded, inputs.take_along_dim(places, dim=1))
    return decoding + relative_l2(encoded, step.encoded.flatten(1).detach())


def constant_along_characteristics(model: Any, step: TaskStep) -> torch.Tensor:
    """Measures how far predictions of advection change along x - beta t = const, by the initial state's L2: (B,).

    Each point is compared with the one on its characteristic at the mirrored time: the first and the last, and so on.
    The exact solution has 0. Cost: decoding of Q points.
    """
    here = model.coordinates("advection1d", step.points)
    x, t = here.unbind(-1)
    mirrored = 1 + 1 / ADVECTION_TIMES - t
    there = torch.stack([(x + ADVECTION_SPEED * (mirrored - t)) % 1.0, mirrored], dim=-1)
    change = model.decode("advection1d", step.latents, there).float() - step.predictions.float()
    scale = step.inputs.float().square().mean(1).sqrt().clamp_min(1e-6)
    return change.square().mean(1).sqrt() / scale


def ritz_energy(model: Any, step: TaskStep) -> torch.Tensor:
    """Computes the energy 1/2 a |grad u|^2 - u of Darcy flow, least at the solution, by the training mean of u: (B,).

    By the finite volumes that made the data, over every 5th of the step's points and the four cells around each: on
    all cells, the sum that the exact solution makes smallest. Its minimum is not 0 but about -1/2. It has first
    differences only, where the residual of the equation has second ones, which enlarge rounding by r * r.

    Cost: decoding of Q points.
    """
    cells = step.points[:, ::5]
    size = step.inputs.shape[-1]
    row = cells // size
    column = cells % size
    a = step.inputs.flatten(1).float()
    a_here = a.take_along_dim(cells, dim=1)
    shifts = ((-1, 0), (1, 0), (0, -1), (0, 1))
    inside = [(row + i >= 0) & (row + i < size) & (column + j >= 0) & (column + j < size) for i, j in shifts]
    around = [torch.where(ok, cells + i * size + j, cells) for ok, (i, j) in zip(inside, shifts)]
    decoded = model.decode("darcy2d", step.latents, model.coordinates("darcy2d", torch.cat([cells, *around], dim=1)))
    here, *near = decoded.float().chunk(5, dim=1)
    energy = -here
    for ok, places, u in zip(inside, around, near):
        a_near = a.take_along_dim(places, dim=1)
        between = 0.5 * a_here * a_near / (a_here + a_near) * (here - u).square()  # half of a face that two cells share
        energy = energy + size**2 * torch.where(ok, between, a_here * here.square())
    return energy.mean(1) / model.config.target_means["darcy2d"]


PRIORS = {"advection1d": constant_along_characteristics, "darcy2d": ritz_energy}
