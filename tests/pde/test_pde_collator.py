"""Rows of all tasks and the points that a step decodes: the same for any batch, another choice in every epoch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from hf_ext.pde.data import OperatorCollator, OperatorRows
from hf_ext.pde.results import ErrorMetrics, score_split, trivial_errors

TASKS = ["advection1d", "darcy2d"]
NUM_POINTS = 12


def make_rows(is_evaluation: bool = False, numbers=(5, 3)) -> OperatorRows:
    """Task k, sample i, point q has the value 100 k + 20 i + q."""
    samples = {
        name: {
            "inputs": torch.arange(num, dtype=torch.float32)[:, None],
            "targets": 100.0 * k + 20 * torch.arange(num)[:, None] + torch.arange(NUM_POINTS),
        }
        for k, (name, num) in enumerate(zip(TASKS, numbers))
    }
    return OperatorRows(samples, is_evaluation)


def test_a_task_with_fewer_samples_begins_anew():
    rows = make_rows()
    assert len(rows) == 5
    batch = OperatorCollator(TASKS, NUM_POINTS)([rows[i] for i in range(5)])
    assert batch["advection1d_inputs"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert batch["darcy2d_inputs"].flatten().tolist() == [0, 1, 2, 0, 1]
    assert "points" not in batch  # all of them
    assert batch["labels"][3, 1].tolist() == [100.0 + q for q in range(NUM_POINTS)]


def test_labels_are_those_of_the_points_and_a_row_keeps_them_in_any_batch():
    rows, collator = make_rows(), OperatorCollator(TASKS, NUM_POINTS, 4, seed=1)
    together = collator([rows[i] for i in range(5)])
    assert together["points"].shape == together["labels"].shape == (5, 2, 4)
    for i, (row, alone) in enumerate((i, collator([rows[i]])) for i in (4, 0, 2)):
        assert torch.equal(alone["points"][0], together["points"][row]), i
        for k, sample in enumerate((row, row % 3)):
            assert torch.equal(alone["labels"][0, k], 100.0 * k + 20 * sample + alone["points"][0, k])
    assert len({tuple(points.tolist()) for points in together["points"].flatten(0, 1)}) > 5  # not one choice for all


def test_another_epoch_or_seed_draws_other_points_also_in_workers_that_live_on():
    rows, collator = make_rows(), OperatorCollator(TASKS, NUM_POINTS, 4)
    loader = DataLoader(rows, 5, collate_fn=collator, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1, 0):
        collator.set_epoch(epoch)
        (batch,) = loader
        seen.append(batch["points"])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(
        seen[0], OperatorCollator(TASKS, NUM_POINTS, 4, seed=9)([rows[i] for i in range(5)])["points"]
    )


def test_evaluation_has_all_points():
    rows = make_rows(is_evaluation=True)
    batch = OperatorCollator(TASKS, NUM_POINTS, 4)([rows[0], rows[1]])
    assert "points" not in batch
    assert batch["labels"].shape == (2, 2, NUM_POINTS)


def test_metrics_are_means_over_rows_of_each_task_by_hand():
    labels = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 5.0]]])
    logits = torch.tensor([[[3.0, 4.5], [1.5, 0.0]], [[0.0, 1.0], [0.0, 5.0]]])
    metrics = ErrorMetrics(TASKS)
    errors = metrics.reduce(logits, labels)
    assert errors.flatten().tolist() == pytest.approx([0.1, 0.5, 0.5, 0.0])

    class Prediction:
        predictions = errors.numpy()

    expected = {"advection1d_nrmse": 0.3, "darcy2d_nrmse": 0.25, "nrmse": 0.275}
    assert metrics(Prediction) == pytest.approx(expected)
    weighted = ErrorMetrics(TASKS, [1.0, 3.0])
    rows = {name: weighted.row_values(name, Prediction.predictions).tolist() for name in weighted.row_metrics}
    assert rows["loss"] == pytest.approx([1.6, 0.5])
    assert rows["nrmse"] == pytest.approx([0.3, 0.25])
    assert (rows["advection1d_nrmse"], rows["darcy2d_nrmse"]) == (pytest.approx([0.1, 0.5]), pytest.approx([0.5, 0.0]))


def test_scores_stand_beside_the_best_trivial_prediction_of_each_task():
    train = {name: {"inputs": torch.ones(2, 2).numpy(), "targets": torch.ones(2, 1, 2).numpy()} for name in TASKS}
    split = {
        name: {"inputs": torch.full((40, 2), 4.0).numpy(), "targets": torch.full((40, 1, 2), 2.0).numpy()}
        for name in TASKS
    }
    trivial = trivial_errors(train, split)  # the mean is half of it, the initial state twice
    assert trivial["training mean"].tolist() == [[0.5, 0.5]] * 40
    assert trivial["persistence"][:, 0].tolist() == [1.0] * 40
    found = score_split(torch.full((40, 2), 0.1).double().numpy(), trivial, TASKS, seed=0)
    assert found["factors"] == pytest.approx({"advection1d": 5.0, "darcy2d": 5.0})
    assert found["verdict"]["outcome"] == "better"
    worse = score_split(torch.full((40, 2), 0.7).double().numpy(), trivial, TASKS, seed=0)
    assert worse["verdict"]["outcome"] == "no better"
    assert "darcy2d_nrmse" not in found["scores"]["persistence"]
