"""Out of memory: known in every form, and met with a smaller batch that learns the same."""

import dataclasses

import pytest
import torch
from miniature_esm import make_wide_esm
from run_outcomes import KillAt, Killed
from small_memory import Room
from tiny_generators import make_batch, make_generator
from tiny_generators import make_rows as make_generator_rows
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import EsmTokenizer, Trainer

from hf_ext.data import ResidueTokenizer, SequenceCollator, cut_batch
from hf_ext.errors import MemoryExhausted, PlanRefused, is_out_of_memory
from hf_ext.hardware import detect_hardware
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training.fitting import halving

pytestmark = pytest.mark.internals

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


GIVEN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
WIDTH = 41


def pad_all(rows):
    """As wide as the longest of all rows, so that dropout draws for a part what it draws for a batch of its rows."""
    ids = [[*row["input_ids"], *[1] * (WIDTH - len(row["input_ids"]))] for row in rows]
    labels = [[*row["labels"], *[-100] * (WIDTH - len(row["labels"]))] for row in rows]
    batch = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    return {**batch, "attention_mask": batch["input_ids"].ne(1).long()}


def run(folder, room=None, dtype=torch.float64, trainer=FastTrainer, collator=pad_all, **given):
    """Trains, in a device that has this room."""
    model = make_wide_esm(hidden_dropout_prob=given.pop("dropout", 0.0)).to(dtype)
    (room or Room()).watch(model.esm.encoder.layer[1])
    callbacks = given.pop("callbacks", [])
    made = trainer(model, make_args(folder, **{**GIVEN, **given}), collator, make_rows(), callbacks=callbacks)
    made.train()
    return made


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parts(trainer):
    """After which steps batches were cut, and into how many."""
    return [(entry["step"], entry["batch_parts"]) for entry in trainer.state.log_history if "batch_parts" in entry]


# --- a step that does not fit -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), collator=pad_rows)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("rows", "calls", "cut", "asked"),
    [
        (2, (), [(0, 2)], [4, 2, 2, 2, 2]),
        (1, (), [(0, 4)], [4, 2, 1]),
        (None, (2,), [(0, 2)], [4, 4, 2, 2, 2, 2]),  # the first half of the step is computed again, too
        (None, (3,), [(1, 2)], [4, 4, 4, 2, 2, 2, 2]),
    ],
)
def test_a_step_that_did_not_fit_has_the_gradient_of_one_that_does(tmp_path, whole, where, rows, calls, cut, asked):
    room = Room(rows, where, calls)
    halved = run(tmp_path, room, collator=pad_rows)
    assert parts(halved) == cut
    assert room.asked[: len(asked)] == asked
    assert losses(halved) == pytest.approx(losses(whole), abs=1e-12)
    assert (weights(halved) - weights(whole)).abs().max() < 1e-12


def test_a_part_that_is_lost_is_seen(tmp_path, whole, monkeypatch):
    def lose(self, batches, compute):
        return [compute(cut_batch(batch, self.parts)[0]) for batch in batches][-1]

    monkeypatch.setattr(halving.Halving, "_pass", lose)
    lost = run(tmp_path, Room(2), collator=pad_rows)
    assert (weights(lost) - weights(whole)).abs().max() > 1e-4


def test_dropout_draws_from_the_states_before_the_step(tmp_path, monkeypatch):
    room = Room(None, "backward", (2,))
    halved = run(tmp_path / "halved", room, dropout=0.2)
    begun = run(tmp_path / "begun", dropout=0.2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert room.num_failed == 1
    assert torch.equal(weights(halved), weights(begun))
    monkeypatch.setattr(halving, "capture_random_states", lambda: lambda: None)  # the broken twin
    forgetful = run(tmp_path / "forgetful", Room(None, "backward", (2,)), dropout=0.2)
    assert not torch.equal(weights(forgetful), weights(begun))


def test_a_run_killed_after_a_step_in_parts_goes_on_in_parts_with_the_same_bytes(tmp_path):
    given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "dtype": torch.float32}
    given["dropout"] = 0.2
    expected = run(tmp_path / "whole", Room(calls=(3,)), **given)
    with pytest.raises(Killed):
        run(tmp_path / "killed", Room(calls=(3,)), callbacks=[KillAt(3)], **given)
    room = Room()
    resumed = run(tmp_path / "killed", room, resume="auto", **given)
    assert set(room.asked) == {2}
    assert torch.equal(weights(resumed), weights(expected))
    assert losses(resumed) == losses(expected)
    assert parts(resumed) == [(1, 2)]


class MeanOfBatch(FastTrainer):
    """A loss of the user's: the mean of a batch, which parts of it would not add up to."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_where_nothing_can_be_halved_the_run_ends_as_under_trainer_or_says_what_would_help(tmp_path):
    for given in ({"trainer": MeanOfBatch}, {"trainer": Trainer, "dtype": torch.float32}):
        with pytest.raises(torch.OutOfMemoryError):
            run(tmp_path, Room(3), **given)
    words = r"Step 1 does not fit with the fewest rows .*CUDA.*--per_device_train.*--use_peft.*smaller model"
    with pytest.raises(MemoryExhausted, match=words) as ended:
        run(tmp_path, Room(0))
    assert ended.value.exit_code == 69


class Swap(torch.nn.Module):
    def forward(self, states):
        return states.transpose(1, 2)


def test_of_a_model_that_normalises_over_batches_nothing_is_made_again(tmp_path):
    model = make_wide_esm()
    model.lm_head.layer_norm = torch.nn.Sequential(Swap(), torch.nn.BatchNorm1d(model.config.hidden_size), Swap())
    Room(2).watch(model.esm.encoder.layer[1])
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(tmp_path, model).train()


def test_rows_that_share_an_input_or_lack_it_are_cut_with_it(demo_encoders):
    model = make_generator()
    batch = make_batch([make_generator_rows()[i] for i in (0, 1, 0, 3, 0)])
    total = batch["labels"].ne(-100).sum()
    expected = model(**batch, num_items_in_batch=total).loss
    parts = cut_batch(batch, 2)
    assert [len(part["input_ids"]) for part in parts] == [2, 2]  # of three antigens
    assert sum(model(**part, num_items_in_batch=total).loss for part in parts).item() == pytest.approx(expected.item())
    assert abs(sum(model(**part).loss for part in parts).item() - expected.item()) > 0.1

    tokenizer = ResidueTokenizer(EsmTokenizer.from_pretrained(demo_encoders[1]), 1)
    collate = SequenceCollator({"heavy": tokenizer}, {"heavy": ["heavy"]}, missing_chains=["heavy"])
    chains = ["EVQL", "", "EVQK", "", "", "KVQL", "QVQL"]
    whole = collate([{"heavy": chain, "label": 1.0 * i} for i, chain in enumerate(chains)])
    for part, numbers in zip(cut_batch(whole, 4), ([0, 1], [2, 3], [4, 5], [6]), strict=True):
        heavy = part["sequences"]["heavy"]
        for place, number in zip(heavy["place"].tolist(), numbers, strict=True):
            assert (place < 0) == (chains[number] == "")
            ids = tokenizer([chains[number] or "A"])["input_ids"][0]
            assert place < 0 or torch.equal(heavy["input_ids"][place], ids)
        assert part["labels"].tolist() == numbers
    for uncut in ({"input_ids": torch.ones(1, 20), "cu_seqlens": torch.tensor([0, 8, 20])}, {"a": torch.tensor(1)}, {}):
        assert cut_batch(uncut, 2) == [uncut]


# --- the most rows that fit -------------------------------------------------------------------------------------------


FIND = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "find_batch_size": True}
FIND["optim"] = "adamw_torch"


def sizes(trainer):
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("room", "expected"), [(None, (12, 1)), (7, (6, 2)), (1, (1, 12))])
def test_a_run_with_the_rows_that_were_found_is_that_with_the_rows_given(tmp_path, room, expected):
    """With dropout: the step that is tried draws random numbers, and gives them back."""
    found = run(tmp_path / "found", Room(room), dropout=0.2, **FIND)
    assert sizes(found) == expected
    both = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), expected))
    given = run(tmp_path / "given", dropout=0.2, **{**FIND, **both, "find_batch_size": False})
    assert torch.equal(weights(found), weights(given))
    evidence = found.plan["find_batch_size"].evidence
    assert (evidence["rows"], evidence["passes"]) == expected
    assert evidence["predicted_rows"] > 12  # of a tiny model, the ledger lets more pass


def test_the_ledger_rules_out_what_is_not_tried_and_the_effective_batch_stays(tmp_path):
    args = make_args(tmp_path, find_batch_size=True, effective_batch_size=96, max_steps=1)
    model = make_wide_esm(hidden_size=96)
    room = Room()
    room.watch(model.esm.encoder.layer[1])
    machine = dataclasses.replace(detect_hardware("cpu"), memory_gib=(0.6 + 0.012) / 0.92)  # 12 MiB for the run
    plan = make_plan(args, model, make_rows(120), pad_rows, hardware=machine)
    trainer = FastTrainer(model, args, pad_rows, make_rows(120), plan=plan)
    trainer.train()
    rows, passes = sizes(trainer)
    predicted = trainer.plan["find_batch_size"].evidence["predicted_rows"]
    assert rows * passes == 96
    assert rows == max(size for size in range(1, predicted + 1) if 96 % size == 0) < 96
    assert room.asked[:2] == [rows, rows]  # one try, with gradients standing in its second pass
    assert max(room.asked) == rows
    packed = {"speedups": ["attention", "packing"], "attention": "blocked", "max_steps": 1, "find_batch_size": True}
    (trainer := make_trainer(tmp_path / "packed", **packed)).train()
    evidence = trainer.plan["find_batch_size"].evidence
    assert evidence["predicted_rows"] > 1000  # counted, too: the kernel for packed rows reads no values then


def test_a_continued_run_takes_the_rows_of_its_checkpoint_and_ends_in_the_same_bytes(tmp_path):
    given = {**FIND, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "dtype": torch.float32}
    expected = run(tmp_path / "whole", Room(7), **given)
    with pytest.raises(Killed):
        run(tmp_path / "killed", Room(7), callbacks=[KillAt(3)], **given)
    resumed = run(tmp_path / "killed", resume="auto", **given)  # where twelve rows would fit
    assert sizes(resumed) == sizes(expected) == (6, 2)
    assert torch.equal(weights(resumed), weights(expected))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size changes the rows of a step"),
        ({"max_tokens_per_batch": 400}, "passes follow --max_tokens_per_batch"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"max_steps": 1, "rows": "stream"}, "longest rows of a stream are not known"),
    ],
)
def test_what_cannot_be_found_is_refused_before_the_run(tmp_path, given, words):
    rows = make_rows().to_iterable_dataset() if given.pop("rows", None) else None
    with pytest.raises(PlanRefused, match=rf"find_batch_size: .*{words}"):
        make_trainer(tmp_path, rows=rows, find_batch_size=True, **given)


def test_no_row_that_fits_is_an_error_that_says_what_helps(tmp_path):
    with pytest.raises(MemoryExhausted, match=r"not even one of the longest rows fits.*--use_peft"):
        run(tmp_path, Room(0), **FIND)
