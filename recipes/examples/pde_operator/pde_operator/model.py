"""OperatorTransformer: reads a function on a grid, and writes the solution of its equation at any points.

Written here and not taken from the `neuraloperator` package (2.0), which brings wandb, h5py, matplotlib and tensorly,
and whose only Transformer, CODANO, attends among channels and decodes the whole of the grid that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from hf_ext.errors import ArgumentError

from .configuration import TASKS, OperatorConfig
from .layers import GridEncoder, OperatorBlock, QueryDecoder


@dataclass
class OperatorOutput(ModelOutput):
    """Of a batch of B rows: `loss`, scalar, float32, None without labels; `logits`, (B, tasks, Q), float32, predictions
    in the unit of the data."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class TaskStep:
    """What a step has computed of one task.

    Attributes:
        inputs: (B, ...), in the unit of the data.
        encoded: (B, T, d), latents before the trunk.
        latents: (B, T, d), latents after it.
        points: (B, Q), int64: the places on the task's grid that were decoded.
        predictions: (B, Q), there, in the unit of the data, float32.
    """

    inputs: torch.Tensor
    encoded: torch.Tensor
    latents: torch.Tensor
    points: torch.Tensor
    predictions: torch.Tensor


Terms = Callable[["OperatorTransformer", str, TaskStep], torch.Tensor | float]


class OperatorTransformer(PreTrainedModel):
    """An encoder and a decoder per task around a trunk that all tasks share, and go through as one batch.

    All methods take and return data in their own units. Under autocast the matrices are in half precision; coordinates,
    predictions and losses are float32. A loss is a sum over rows by the rows of the whole effective batch, so that
    accumulation and several processes give the gradients of one batch.

    Attributes:
        terms: what else a row's loss has in training, such as inverse losses: called once per task with model, task and
            `TaskStep`, returns (B,) or a number. None; it is no part of a saved model.

    Cost of a step, per row and task, with T tokens of width d and L blocks: 6 T L (12 d^2 + 2 T d) floating-point
    operations in the trunk, forward and backward; encoder and decoder add a tenth of that in the default configuration
    with all points, and half as much again as the trunk takes in the small one of the demo.
    """

    config_class = OperatorConfig
    base_model_prefix = "operator"
    main_input_name = "darcy2d_inputs"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _no_split_modules = ["OperatorBlock"]

    def __init__(self, config: OperatorConfig):
        super().__init__(config)
        tasks = config.tasks or []
        self.main_input_name = f"{tasks[0]}_inputs"
        self.encoders = nn.ModuleDict({name: GridEncoder(config, name) for name in tasks})
        self.blocks = nn.ModuleList(OperatorBlock(config) for _ in range(config.num_hidden_layers))
        self.decoders = nn.ModuleDict(
            {name: QueryDecoder(config, name, vanishes=TASKS[name].is_zero_at_boundary) for name in tasks}
        )
        self.input_decoders = nn.ModuleDict({name: QueryDecoder(config, name, vanishes=False) for name in tasks})
        self.terms: Terms | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws weights so that a layer puts out as much as goes in.

        What a block adds, by the depth of all, is smaller.
        """
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            fan_in = module.weight[0].numel()
            if isinstance(module, nn.ConvTranspose2d):  # kernels do not overlap: each output sees one of their places
                fan_in = len(module.weight)
            init.normal_(module.weight, mean=0.0, std=fan_in**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, OperatorBlock):
            depth = (2 * self.config.num_hidden_layers) ** 0.5
            for last in (module.attention.output, module.feed_forward.output):
                init.normal_(last.weight, mean=0.0, std=last.in_features**-0.5 / depth)
        else:
            super()._init_weights(module)

    def encode(self, task: str, inputs: torch.Tensor) -> torch.Tensor:
        """Encodes inputs, (B, *input_shape), as latents before the trunk, (B, T, d).

        Raises:
            ArgumentError: inputs on another grid.
        """
        config = self.config
        shape = TASKS[task].input_shape(config.resolution)
        if inputs.shape[1:] != shape:
            raise ArgumentError(
                f"{task}_inputs of shape {tuple(inputs.shape)}: must be (rows, {', '.join(map(str, shape))}), the grid "
                f"of resolution {config.resolution} that this model was built for."
            )
        return self.encoders[task]((inputs.float() - config.input_means[task]) / config.input_stds[task])

    def propagate(self, *latents: torch.Tensor, tasks: Sequence[str] | None = None) -> list[torch.Tensor]:
        """Runs the trunk, through which all tasks go as one batch.

        Args:
            latents: one or more of (B, T, d), from `encode`.
            tasks: which task each of them is of; None: those of the configuration, in order.

        Returns:
            As many, of the same shapes.
        """
        names = list(tasks or self.config.tasks or [])
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        encoders: list[Any] = [self.encoders[name] for name in names]
        angles = [
            encoder.angles(half, one.device).expand(len(one), 1, -1, -1)
            for encoder, one in zip(encoders, latents, strict=True)
        ]
        cosines = torch.cat(angles).cos()
        sines = torch.cat(angles).sin()
        hidden_states = torch.cat(latents)
        for block in self.blocks:
            hidden_states = block(hidden_states, cosines, sines)
        return list(hidden_states.split([len(one) for one in latents]))

    def decode(self, task: str, latents: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Decodes the solution at query points, in the unit of the data.

        Args:
            latents: (B, T, d), after the trunk.
            queries: (B, Q, 2), float32, coordinates from 0 to 1, on the grid or not; x and t of
                advection, x and y of Darcy flow.

        Returns:
            (B, Q), float32. Of Darcy flow it is exactly 0 on the boundary.
        """
        values = self.decoders[task](latents, queries)
        mean = 0.0 if TASKS[task].is_zero_at_boundary else self.config.target_means[task]
        return mean + self.config.target_stds[task] * values

    def decode_inputs(self, task: str, latents: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Decodes the input function from its encoding, in the unit of the data.

        Args:
            latents: (B, T, d), before the trunk.
            places: (B, Q), int64, of the flattened input grid.

        Returns:
            (B, Q), float32.
        """
        (rows, columns), _ = self.config.grid(task)
        if TASKS[task].has_time:
            queries = torch.stack([places / columns, torch.zeros_like(places, dtype=torch.float32)], dim=-1)
        else:
            queries = torch.stack([(places // columns + 0.5) / rows, (places % columns + 0.5) / columns], dim=-1)
        values = self.input_decoders[task](latents, queries)
        return self.config.input_means[task] + self.config.input_stds[task] * values

    def coordinates(self, task: str, points: torch.Tensor) -> torch.Tensor:
        """Returns the coordinates of points of the target's grid: (..., 2), float32, for `decode`.

        Args:
            points: (...), int64, places in a flattened target.
        """
        return torch.stack(TASKS[task].locate(points, self.config.resolution), dim=-1)

    def forward(
        self,
        labels: torch.Tensor | None = None,
        points: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: torch.Tensor,
    ) -> OperatorOutput:
        """Returns predictions of B rows, each with one sample of every task, and their loss.

        Args:
            labels: (B, tasks, Q), float, solutions at `points`, in the order of `config.tasks`.
            points: (B, tasks, Q), int64, places in flattened targets; None: all of them.
            num_items_in_batch: labels in the whole effective batch, as Trainer counts them; None: those here.
            inputs: `{task}_inputs`, (B, *input_shape), float, of each task.

        Returns:
            `OperatorOutput`. The loss is, summed over tasks with their weights, the relative L2 at the points, and what
            `terms` add in training; summed over rows, by the rows of the whole effective batch.

        Raises:
            ArgumentError: inputs or labels have another shape.
        """
        names = self.config.tasks
        encoded = [self.encode(name, inputs[f"{name}_inputs"]) for name in names]
        latents = self.propagate(*encoded)
        if points is None:
            points = torch.arange(self.config.resolution**2, device=encoded[0].device)
            points = points.expand(len(encoded[0]), len(names), -1)
        predictions = []
        extra = []
        for i, name in enumerate(names):
            predictions.append(self.decode(name, latents[i], self.coordinates(name, points[:, i])))
            if self.terms is not None and self.training and labels is not None:
                step = TaskStep(inputs[f"{name}_inputs"], encoded[i], latents[i], points[:, i], predictions[i])
                extra.append(self.terms(self, name, step))
        logits = torch.stack(predictions, dim=1)
        if labels is None:
            return OperatorOutput(logits=logits)
        if labels.shape != logits.shape:  # what broadcasts would give a wrong loss
            raise ArgumentError(f"labels of shape {tuple(labels.shape)}: must be {tuple(logits.shape)}.")
        losses = self.row_losses(logits, labels)
        if self.training:  # each weight has a gradient in each step, as DDP waits for, also where no term reads it
            losses = losses + 0.0 * sum(weight.sum() for weight in self.input_decoders.parameters())
        for term, weight in zip(extra, self.config.task_weights):
            losses = losses + weight * term
        num_rows = len(labels) if num_items_in_batch is None else num_items_in_batch / labels[0].numel()
        return OperatorOutput(loss=losses.sum() / num_rows, logits=logits)

    def row_losses(
        self, logits: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the loss of each row, (B,), float32, without `terms`; `bounds` is not read."""
        errors = relative_l2(logits, labels)
        return sum(weight * errors[:, i] for i, weight in enumerate(self.config.task_weights or []))


def relative_l2(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Computes the L2 of the error over the L2 of the target, along the last dimension, in float32.

    Args:
        predictions, targets: (..., Q), any float dtype.

    Returns:
        (...), float32. Targets that are 0 everywhere count as of size 1e-12, so the result is finite; where both are
        equal, the gradient is 0.
    """
    true = targets.float()
    error = torch.linalg.vector_norm(predictions.float() - true, dim=-1)
    return error / torch.linalg.vector_norm(true, dim=-1).clamp_min(1e-12)


# `AutoModel.from_pretrained` of a saved run, once this module was imported.
AutoConfig.register(OperatorConfig.model_type, OperatorConfig)
AutoModel.register(OperatorConfig, OperatorTransformer)
