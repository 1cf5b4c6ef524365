"""The finder takes the largest batch that fits, keeps the rows of a step, and leaves everything else as it was."""

import gc
import random

import numpy as np
import pytest
import torch
from faulty_runs import messages
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_rows, make_trainer

from hf_ext.errors import ArgumentError, MemoryExhausted
from hf_ext.training.oom_policy import find_batch_size

STEP = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "optim": "adamw_torch", "max_steps": 20}


def watched(room, **shape):
    model = make_wide_esm(**shape)
    room.watch(model.esm.encoder.layer[1])
    return model


def find(folder, room, shape=None, **given):
    model = watched(room, **(shape or {}))
    given = {**STEP, "speedups": "find_batch_size", **given}
    trainer = make_trainer(folder / "out", model, **given)
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("room", "rows", "passes"), [(None, 12, 1), (7, 6, 2), (3, 3, 4), (1, 1, 12)])
def test_weights_after_20_steps_equal_those_of_the_batch_given(tmp_path, room, rows, passes):
    """With dropout: the tries draw random numbers, and give them back."""
    shape = {"hidden_dropout_prob": 0.1}
    found = find(tmp_path, Room(room), shape)
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (rows, passes)
    sizes = {**STEP, "per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    given = make_trainer(tmp_path / "given", make_wide_esm(**shape), **sizes)
    given.train()
    assert found.state.global_step == given.state.global_step == 20
    assert torch.equal(weights(found), weights(given))
    evidence = found.plan["find_batch_size"].evidence
    assert evidence["rows"] == rows
    assert [t["size"] for t in evidence["tried"]] == [size for size in (1, 2, 3, 4, 6, 12) if size <= 2 * rows][
        : len(evidence["tried"])
    ]
    assert [t["fits"] for t in evidence["tried"]][-1] is (rows == 12)


def test_tries_see_the_longest_rows_forward_and_backward(tmp_path):
    room = Room(5, "backward")
    trainer = find(tmp_path, room, max_steps=1)
    assert trainer.args.per_device_train_batch_size == 4
    assert room.asked[:3] == [1, 1, 2]  # a step takes several passes, so gradients are there in the second
    widths = Room(unit="tokens")
    find(tmp_path, widths, max_steps=1)
    assert widths.asked[0] == max(len(row["input_ids"]) for row in make_rows())


def test_what_a_failed_try_held_is_freed(tmp_path):
    def living():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if torch.is_tensor(t))

    trainer = make_trainer(
        tmp_path / "out",
        watched(Room(2)),
        **{**STEP, "speedups": "find_batch_size", "max_steps": 1},
    )
    before = living()
    find_batch_size(trainer)
    assert living() - before < 1000
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_no_row_that_fits_is_an_error_that_says_what_helps(tmp_path):
    with pytest.raises(MemoryExhausted, match=r"no room for one of the longest rows.*--use_peft"):
        find(tmp_path, Room(0))


def test_resumed_with_another_batch_the_run_is_the_same(tmp_path):
    whole = find(tmp_path, Room(6), max_steps=4, save_strategy="steps", save_steps=2)
    resumed = make_trainer(
        tmp_path / "out2",
        watched(Room(3)),
        **{**STEP, "max_steps": 4, "speedups": "find_batch_size"},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.args.per_device_train_batch_size == 3
    assert (weights(resumed) - weights(whole)).abs().max() < 1e-3


def test_a_model_that_normalises_over_batches_is_refused_and_a_loss_of_the_users_warned_of(tmp_path):
    model = make_wide_esm()
    model.lm_head.layer_norm = torch.nn.BatchNorm1d(model.config.hidden_size)
    with pytest.raises(ArgumentError, match="normalises over batches"):
        make_trainer(tmp_path, model, speedups="find_batch_size").train()
    with messages() as said:
        trainer = make_trainer(tmp_path, speedups="find_batch_size", max_steps=1)
        trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs["logits"].square().mean()
        trainer.train()
    assert any("not known to be a sum" in line for line in said)


class Drawing(torch.utils.data.Dataset):
    """Rows that draw from every generator there is when they are read, and from one of their own."""

    def __init__(self):
        self.rows, self.generator = make_rows(), np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        drawn = random.random() + torch.rand(()).item() + np.random.rand() + self.generator.random()  # noqa: NPY002
        return {**row, "input_ids": [*row["input_ids"][:-1], 4 + int(drawn * 5)]}


def test_rows_that_draw_draw_the_same_afterwards(tmp_path):
    """The rows read for tries cost the training no number."""
    given = {**STEP, "max_steps": 4, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    plain = make_trainer(tmp_path / "plain", make_wide_esm(), Drawing(), **given)
    plain.train()
    found = make_trainer(tmp_path / "out", watched(Room(6)), Drawing(), **given, speedups="find_batch_size")
    found.train()
    assert found.args.per_device_train_batch_size == 6
    assert torch.equal(weights(found), weights(plain))
