"""Out of memory: known in every form, and met with a smaller batch that learns the same."""

import gc
import weakref

import pytest
import torch
from faulty_runs import messages
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_trainer

from hf_ext.errors import ArgumentError, MemoryExhausted
from hf_ext.memory.out_of_memory import DidNotFit, attempt, is_out_of_memory

IS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("std::bad_alloc"),
)


IS_NOT = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error"),
    RuntimeError("unable to write to file </torch_7>: No space left on device (28)"),
    ValueError("CUDA out of memory"),
    KeyError("std::bad_alloc"),
)


def test_every_form_of_it_is_known_and_nothing_else():
    assert [error for error in IS if not is_out_of_memory(error)] == []
    assert [error for error in IS_NOT if is_out_of_memory(error)] == []


def test_an_attempt_lets_go_of_what_failed():
    held = []

    def work():
        activations = torch.ones(1000)
        held.append(weakref.ref(activations))
        deeper(activations)

    def deeper(states):
        kept = states * 2
        held.append(weakref.ref(kept))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    gc.disable()  # so that nothing else lets go
    try:
        with pytest.raises(DidNotFit, match=r"^CUDA out of memory. Tried$"):
            attempt(work)
        assert [reference() for reference in held] == [None, None]
        with pytest.raises(torch.OutOfMemoryError) as plain:  # the twin: the error holds its frames
            work()
        assert held[2]() is not None
        del plain
    finally:
        gc.enable()


# --- a run that it ends -----------------------------------------------------------------------------------------------


def test_a_run_that_ran_out_of_memory_goes_on_with_half_the_rows_at_a_time(tmp_path):
    given = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", make_wide_esm().double(), **given)
    whole.train()
    with pytest.raises(torch.OutOfMemoryError):  # as under Trainer
        make_trainer(tmp_path / "run", watched(Room(None, calls=(3,))).double(), **given).train()
    given |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "resume": "auto"}
    resumed = make_trainer(tmp_path / "run", make_wide_esm().double(), **given)
    resumed.train()
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert (weights(resumed) - weights(whole)).abs().max() < 1e-12


# --- the largest batch that fits --------------------------------------------------------------------------------------


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


def test_no_row_that_fits_is_an_error_that_says_what_helps(tmp_path):
    with pytest.raises(MemoryExhausted, match=r"no room for one of the longest rows.*--use_peft"):
        find(tmp_path, Room(0))


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
