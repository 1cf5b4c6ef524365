"""The loop in which every row is encoded by itself: the loss of the batch, at the cost of a pass per sequence."""

from __future__ import annotations

import json

import pytest
import torch
from row_by_row import RowByRow, collate, main, measure
from transformers import TrainingArguments

from hf_ext.errors import ArgumentError


@pytest.fixture
def loop(make_affinity) -> RowByRow:
    model, collator = make_affinity("frozen", "frozen")
    return RowByRow(model.train(), collator)


def loss_and_gradient(model: RowByRow, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # dropout of the head
    loss = model(**collate(rows)).loss
    loss.backward()
    return loss.detach(), model.model.head.layers[0].weight.grad.clone()


def test_loss_and_gradient_are_those_of_the_batch(loop, demo_rows) -> None:
    rows = [demo_rows[i] for i in range(5)]
    loss, gradient = loss_and_gradient(loop, rows)
    loop.zero_grad()
    torch.manual_seed(0)
    together = loop.model(**loop.collator(rows)).loss
    together.backward()
    torch.testing.assert_close(loss, together.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, loop.model.head.layers[0].weight.grad, rtol=1e-4, atol=1e-6)
    swapped = [{**row, "antigen": rows[i - 1]["antigen"]} for i, row in enumerate(rows)]
    assert not torch.allclose(loss_and_gradient(loop, swapped)[1], gradient, rtol=1e-4, atol=1e-6)


def test_each_sequence_is_a_pass_of_its_own_in_float32_and_none_is_kept(loop, demo_rows) -> None:
    passes = []
    for encoder in loop.model.encoders.values():
        encoder.register_forward_hook(
            lambda module, args, kwargs, output: passes.append(
                (len(kwargs["input_ids"]), output.last_hidden_state.dtype, output.last_hidden_state.requires_grad)
            ),
            with_kwargs=True,
        )
    rows = [demo_rows[0]] * 4
    for _ in range(2):
        loop(**collate(rows))
    assert passes == [(1, torch.float32, False)] * (2 * 4 * len(loop.collator.columns))


def test_a_sample_of_the_rows_is_measured_after_the_warmup(loop, demo_rows, tmp_path) -> None:
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        save_strategy="no",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    measure(args, 10, loop, demo_rows)
    found = json.loads((tmp_path / "throughput.json").read_text())
    assert (found["warmup_steps"], found["measured_steps"], found["unit"]) == (3, 3, "sequences")
    assert found["totals"]["sequences"] == 12  # 10 rows are not three passes of 4
    assert (found["rows_per_epoch"], found["steps_per_epoch"]) == (len(demo_rows), -(-len(demo_rows) // 4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tower_training", "lora"], "row_by_row is a loop on frozen encoders: --tower_training lora"),
        (["--streaming", "true"], "row_by_row draws a sample of all training rows: leave --streaming out"),
        (["--sample_rows", "0"], "--sample_rows 0: must be at least 1"),
    ],
)
def test_what_the_loop_cannot_be_is_refused(words, message, tmp_path) -> None:
    with pytest.raises(ArgumentError, match=message):
        main([*words, "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"])
    assert not (tmp_path / "out").exists()
