"""Out of memory in every form in which libraries say it, and nothing else; and what an attempt held is free."""

import gc
import weakref

import pytest
import torch

from hf_ext.errors import is_out_of_memory
from hf_ext.memory.out_of_memory import DidNotFit, attempt

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


def test_the_cause_of_another_error_counts_and_its_context_does_not():
    def wrap(chained):
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise KeyError("compiler") from (error if chained else None)
        except KeyError as error:
            return error

    assert is_out_of_memory(wrap(True))
    assert not is_out_of_memory(wrap(False))


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
