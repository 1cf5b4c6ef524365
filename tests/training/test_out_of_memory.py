"""Out of memory: known in every form, and met with a smaller batch that learns the same."""

import pytest
import torch
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_trainer

from hf_ext.errors import is_out_of_memory

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


def watched(room):
    model = make_wide_esm()
    room.watch(model.esm.encoder.layer[1])
    return model


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


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
