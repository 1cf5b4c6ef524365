"""Samples of all tasks as rows, and batches of them: inputs, the points to decode, and the values there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from ..errors import ArgumentError
from ..models.auxiliary import choose_points


class OperatorRows(Dataset):
    """Row i holds sample i of each task; a task with fewer samples than another begins anew.

    So all batches have the same shapes, and each step trains all tasks.

    Args:
        samples: task -> {"inputs": (n, ...), "targets": (n, Q)}, float32, with one Q for all tasks.
        is_evaluation: whether all points are to be decoded, whatever the collator draws.
    """

    def __init__(self, samples: Mapping[str, Mapping[str, torch.Tensor]], is_evaluation: bool = False):
        self.samples = samples
        self.is_evaluation = is_evaluation

    def __len__(self) -> int:
        return max(len(task["targets"]) for task in self.samples.values())

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {"row_id": index, "is_evaluation": self.is_evaluation}
        for name, task in self.samples.items():
            place = index % len(task["targets"])
            row[f"{name}_inputs"], row[f"{name}_targets"] = task["inputs"][place], task["targets"][place]
        return row


class OperatorCollator:
    """Stacks rows, and draws for each sample the points that a training step decodes.

    Points are a function of seed, epoch, task and row (`choose_points`): not of workers, processes, batches, order or
    restarts. `FastTrainer` says the epoch by itself, with `Trainer` add `MaskingEpochCallback`.

    Args:
        tasks: names, in the order in which they stand in a batch.
        num_points: Q, of each sample.
        num_queries: how many of them a training step decodes; None for all.
        seed: any integer.

    Raises:
        ArgumentError: `num_queries` is not from 1 to `num_points`.

    Cost: 60 ns per point of a row.
    """

    def __init__(self, tasks: Sequence[str], num_points: int, num_queries: int | None = None, seed: int = 0):
        if num_queries is not None and not 1 <= num_queries <= num_points:
            raise ArgumentError(f"num_queries={num_queries}: must be from 1 to {num_points}, all points of a sample.")
        self.tasks = [*tasks]
        self.num_points = num_points
        self.num_queries = num_queries or num_points
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live for long see it change

    def set_epoch(self, epoch: int) -> None:
        """Draws for `epoch` what is collated from now on, in worker processes too."""
        self._epoch.fill_(epoch)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of B rows.

        Returns:
            `{task}_inputs` (B, ...) and `labels` (B, tasks, q), float32; where q < Q points were drawn, `points`
            (B, tasks, q), int64, which say where the labels lie.
        """
        batch = {f"{name}_inputs": torch.stack([row[f"{name}_inputs"] for row in features]) for name in self.tasks}
        labels = torch.stack([torch.stack([row[f"{name}_targets"] for name in self.tasks]) for row in features])
        if features[0]["is_evaluation"] or self.num_queries == self.num_points:
            return {**batch, "labels": labels}
        points = torch.stack([self._draw(name, [row["row_id"] for row in features]) for name in self.tasks], dim=1)
        return {**batch, "points": points, "labels": labels.take_along_dim(points, dim=2)}

    def _draw(self, task: str, rows: Sequence[int]) -> torch.Tensor:
        identities = [f"{task}\t{row}" for row in rows]
        draw: dict[str, Any] = {"seed": self.seed, "epoch": int(self._epoch), "row_ids": identities}
        return torch.from_numpy(choose_points(self.num_points, self.num_queries, **draw))
