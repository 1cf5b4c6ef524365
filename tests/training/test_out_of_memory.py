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

from hf_ext.errors import MemoryExhausted
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


# --- no step is lost --------------------------------------------------------------------------------------------------


POINTS = [(where, call) for where in ("forward", "backward") for call in (1, 2, 3, 5, 8)]


def train(folder, room=None):
    """Four steps of two micro-batches in float64, where parts of a batch differ by 1e-15; evaluated and saved twice."""
    model = make_wide_esm().double()
    if room is not None:
        room.watch(model.esm.encoder.layer[1])
    given = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.1}
    args = make_args(folder, oom_policy="step_down", **given)
    trainer = FastTrainer(model, args, pad_rows, make_rows(), make_rows(11, 1))
    trainer.train()
    return trainer


def numbers(trainer):
    logged = [e.get("loss", e.get("eval_loss")) for e in trainer.state.log_history if "loss" in e or "eval_loss" in e]
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return logged, weights


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return numbers(train(tmp_path_factory.mktemp("plain")))


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("where", "call"), POINTS)
def test_a_run_that_is_out_of_memory_once_is_the_run_that_is_not(tmp_path, plain, where, call):
    with messages() as said:
        room = Room(None, where, (call,))
        logged, weights = numbers(train(tmp_path, room))
        assert room.num_failed == 1
    assert any("Out of memory" in line for line in said)
    assert logged == pytest.approx(plain[0], abs=1e-6)
    assert (weights - plain[1]).abs().max() < 1e-12
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_lost_step_is_seen(tmp_path, plain):
    lost = FastTrainer.training_step

    def lose(self, model, inputs, *args, **kwargs):
        return torch.zeros((), dtype=torch.float64)

    FastTrainer.training_step = lose
    try:
        _, weights = numbers(train(tmp_path))
    finally:
        FastTrainer.training_step = lost
    assert (weights - plain[1]).abs().max() > 1e-3
