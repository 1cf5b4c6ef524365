"""Out of memory: known in every form, and met with less at a time or a smaller batch that learns the same."""

import gc
import weakref

import pytest
import torch
from faulty_runs import messages
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.errors import ArgumentError, MemoryExhausted
from hf_ext.memory.out_of_memory import DidNotFit, attempt, is_out_of_memory
from hf_ext.trainer import FastTrainer
from hf_ext.training import oom_policy as oom_policy_module

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


# --- a run goes on with less at a time --------------------------------------------------------------------------------


LADDER = {"oom_policy": "step_down", "optim": "adamw_torch_fused", "learning_rate": 1e-2}


def weights_of(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(ours, theirs):
    return all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def run(folder, room=None, model=None, **given):
    model = make_wide_esm() if model is None else model
    if room is not None:
        room.watch(model.esm.encoder.layer[1])
    trainer = make_trainer(folder, model, **{**LADDER, **given})
    trainer.train()
    return trainer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "given"), [(4, (4, 2)), (1, (1, 8))])
def test_a_step_that_does_not_fit_equals_that_of_smaller_batches(tmp_path, where, rows, given):
    room = Room(rows, where)
    stepped = run(tmp_path / "a", room, per_device_train_batch_size=8)
    begun = run(tmp_path / "b", per_device_train_batch_size=given[0], gradient_accumulation_steps=given[1])
    assert room.num_failed == (1 if rows == 4 else 3)  # 8, and then 4 and 2
    assert stepped.plan["oom_ladder"].evidence["taken"][-1]["rung"].startswith(f"{rows} row")
    assert losses_of(stepped) == losses_of(begun)
    assert same(weights_of(stepped), weights_of(begun))


def test_without_the_policy_the_run_ends_as_trainers(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, Room(2), oom_policy="stop", per_device_train_batch_size=4)


@pytest.mark.nightly
def test_with_dropout_random_numbers_are_those_of_the_run_that_began_there(tmp_path, monkeypatch):
    shape = {"hidden_dropout_prob": 0.2}
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    stepped = run(tmp_path / "a", Room(None, "backward", (2,)), make_wide_esm(**shape), **given)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3}
    begun = run(tmp_path / "b", None, make_wide_esm(**shape), **given)
    assert same(weights_of(stepped), weights_of(begun))

    monkeypatch.setattr(oom_policy_module, "restore_rng", lambda tree: None)  # the broken twin
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    broken = run(tmp_path / "c", Room(None, "backward", (2,)), make_wide_esm(**shape), **given)
    assert not same(weights_of(broken), weights_of(begun))


def test_where_nothing_is_left_the_error_says_what_would_help(tmp_path):
    words = r"step 1 \(CUDA.*1 row at a time: nothing is left.*adamw_8bit"
    with pytest.raises(MemoryExhausted, match=words) as ended:
        run(tmp_path, Room(0), per_device_train_batch_size=4)
    assert ended.value.exit_code == 69


def room_for(room):
    model = make_wide_esm()
    room.watch(model.esm.encoder.layer[1])
    return model


class MeanOfBatch(FastTrainer):
    """A loss of the user's: the mean of a batch, which parts of it would not add up to."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_batches_of_a_loss_of_the_users_own_are_not_cut(tmp_path):
    trainer = MeanOfBatch(room_for(Room(None, calls=(1,))), make_args(tmp_path, **LADDER), pad_rows, make_rows())
    with pytest.raises(MemoryExhausted, match="with whole batches: nothing is left"):
        trainer.train()


def normalising_model(room=None):
    """A head whose rows depend on each other."""
    model = make_wide_esm()
    model.lm_head.layer_norm = torch.nn.Sequential(Swap(), torch.nn.BatchNorm1d(model.config.hidden_size), Swap())
    return model if room is None else (room.watch(model.esm.encoder.layer[1]), model)[1]


class Swap(torch.nn.Module):
    def forward(self, states):
        return states.transpose(1, 2)


def test_of_a_model_that_normalises_over_batches_nothing_is_made_again(tmp_path):
    """Parts have other statistics, and a batch computed again counts twice: the run ends, and says what would help."""
    with pytest.raises(MemoryExhausted, match="with whole batches: nothing is left"):
        run(tmp_path / "a", None, normalising_model(Room(None, "backward", (2,))))


def test_a_run_that_ran_out_of_memory_goes_on_with_half_the_rows_at_a_time(tmp_path):
    given = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "whole", None, make_wide_esm().double(), **given)
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path / "run", Room(None, calls=(3,)), make_wide_esm().double(), **given, oom_policy="stop")
    given |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "resume": "auto"}
    resumed = run(tmp_path / "run", None, make_wide_esm().double(), **given)
    assert len(losses_of(resumed)) == 4
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
