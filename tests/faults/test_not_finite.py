"""NaN and infinity, and under a loss scale: the run stops and says where; none is saved."""

import math
import re

import pytest
import torch
from accelerate import Accelerator
from faulty_runs import NUM_STEPS, Maker, bits, make_rows, names
from miniature_esm import make_narrow_esm
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from hf_ext.errors import CheckpointError, NotFiniteError
from hf_ext.trainer import FastTrainer

NAN, INF = math.nan, math.inf
WEIGHT = "classifier.dense.weight"


@pytest.fixture(scope="module")
def make():
    return Maker(make_narrow_esm())


class Poison(TrainerCallback):
    """After optimizer step `step` (0: before the first), `change` spoils the model or its optimizer."""

    def __init__(self, step, change):
        self.step, self.change = step, change

    def on_train_begin(self, args, state, control, **kwargs):
        if self.step == 0:
            self.change(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.change(kwargs["model"], kwargs["optimizer"])


def spoil_weight(value, name=WEIGHT):
    def change(model, optimizer):
        with torch.no_grad():
            model.get_parameter(name)[0, 0] = value

    return change


def spoil_optimizer(value, key):
    def change(model, optimizer):
        optimizer.state[model.get_parameter(WEIGHT)][key][0, 0] = value

    return change


def not_finite_files(folder):
    """Saved tensors that are not finite, as FILE:TENSOR."""
    found = []
    for path in folder.rglob("*.safetensors"):
        tensors = load_file(path)
        bad = [name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
        found += [f"{path.relative_to(folder)}:{name}" for name in bad]
    return found


def first_bad_step(watch):
    """The first optimizer step after which a weight is not finite."""
    for step, weights in sorted(watch.weights.items()):
        if any(not torch.frombuffer(bytearray(raw), dtype=torch.float32).isfinite().all() for raw in weights.values()):
            return step
    return None


def stopped(trainer, folder) -> str:
    """That the run ends with NotFiniteError and has saved nothing that is not finite; returns the message."""
    with pytest.raises(NotFiniteError) as end:
        trainer.train()
    assert end.value.exit_code == 65
    assert not_finite_files(folder) == []
    assert "Nothing was overwritten" in str(end.value)
    return str(end.value)


def bad_step(message: str) -> int:
    """The step that a message names."""
    return int(re.search(r"in step (\d+): ", message)[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("label", [NAN, INF, -INF, 1e38], ids=str)
@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "unfiltered"])
def test_a_label_that_is_no_number_ends_the_run_within_its_step_with_the_weights_untouched(
    label, filtered, make, tmp_path
):
    trainer = make(tmp_path, rows=make_rows(row7=label), logging_nan_inf_filter=filtered, save_steps=1)
    message = stopped(trainer, tmp_path)
    bad = bad_step(message)
    assert bad > 1
    assert trainer.state.global_step == bad - 1
    assert re.search(r"loss (nan|inf), gradient norm (nan|inf); rows (7, \d|\d, 7) of the training data", message)
    assert f"checkpoint-{bad - 1} is the last good one" in message
    assert names(tmp_path) == [f"checkpoint-{step}" for step in range(1, bad)]
    assert {n: t.numpy().tobytes() for n, t in trainer.model.state_dict().items()} == make.watch.weights[bad - 1]
    assert [entry["step"] for entry in trainer.state.log_history] == list(range(1, bad))  # no loss of 0.0


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_without_logs_and_saves_it_is_found_all_the_same(strategy, make, tmp_path):
    trainer = make(tmp_path, rows=make_rows(row7=NAN), logging_strategy="no", save_strategy=strategy)
    message = stopped(trainer, tmp_path)
    assert bad_step(message) == trainer.state.global_step + 1
    assert "no checkpoint was saved" in message
    assert names(tmp_path) == []


def test_of_streams_and_loaders_of_the_users_own_is_named_what_is_known(make, tmp_path):
    class Own(FastTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    stream = make_rows(row7=NAN).to_iterable_dataset()
    message = stopped(make(tmp_path / "stream", rows=stream, max_steps=NUM_STEPS), tmp_path)
    assert "; micro-batches 3 of the epoch (process 0)" in message
    message = stopped(make(tmp_path / "own", trainer=Own, rows=make_rows(row7=NAN)), tmp_path)
    assert "; micro-batches 3 of the epoch (process 0)" in message


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_a_weight_that_is_no_number_before_the_first_step_is_found_before_it(value, make, tmp_path):
    trainer = make(tmp_path)
    spoil_weight(value)(trainer.model, None)
    message = stopped(trainer, tmp_path)
    assert f"1 of the weights and optimizer states are NaN or infinite at step 0 (first: {WEIGHT}); no" in message


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_optimizer_state_that_is_no_number_is_not_saved(key, value, make, tmp_path):
    trainer = make(tmp_path, callbacks=[Poison(4, spoil_optimizer(value, key))])
    message = stopped(trainer, tmp_path)
    assert f"at step 4 (first: {key} of {WEIGHT}); checkpoint-2 is the last good one" in message
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_number_that_is_none_between_two_saves_leaves_the_last_good_checkpoint_whatever_the_limit(make, tmp_path):
    poison = Poison(5, spoil_weight(NAN))
    trainer = make(tmp_path, callbacks=[poison], save_total_limit=1)
    assert "at step 5 " in stopped(trainer, tmp_path)
    assert names(tmp_path) == ["checkpoint-4"]


def test_the_run_continues_with_a_lower_rate_that_is_allowed(make, tmp_path):
    given = {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    stopped(make(tmp_path, callbacks=[Poison(5, spoil_weight(NAN))], **given), tmp_path)
    lower = {**given, "learning_rate": 1e-4, "resume": "auto"}
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.01 in the checkpoint, 0\.0001 now"):
        make(tmp_path, **lower).train()
    trainer = make(tmp_path, allow_changed=["learning_rate"], **lower)
    trainer.train()
    assert make.watch.began_at == 4
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [1e-2] * 4 + [1e-4] * 2
    assert first_bad_step(make.watch) is None
    assert not_finite_files(tmp_path) == []


def test_stock_trainer_ends_well_shows_zero_and_saves_them(make, tmp_path):
    trainer = make(tmp_path, trainer=Trainer, rows=make_rows(row7=NAN), save_total_limit=1)
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] == 0.0
    assert names(tmp_path) == ["checkpoint-6"]
    assert "checkpoint-6/model.safetensors:classifier.dense.weight" in not_finite_files(tmp_path)


START = 65536.0


def spoil_gradients(model, rows):
    """Makes every gradient behind the embeddings NaN in batches that hold one of `rows`; the loss stays finite."""
    ids = torch.tensor(make_rows()["input_ids"])[rows]

    def hook(module, inputs, output):
        if (inputs[0][:, None] == ids).all(-1).any() and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)

    model.esm.embeddings.word_embeddings.register_forward_hook(hook)


def round_to_half(model, factor=1.0):
    """The head's output goes through float16, so that its gradient, times the scale and `factor`, may overflow."""
    model.classifier.register_forward_hook(lambda module, inputs, output: (output * factor).half().float() / factor)


@pytest.fixture
def make_scaled(tmp_path, monkeypatch):
    """A trainer that scales its loss on the CPU, set up as accelerate does it for fp16 on a GPU."""
    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))

    def scaled(change=lambda model: None, scale=START, **given):
        model = make_narrow_esm()
        change(model)
        given = {"max_steps": 60, "save_strategy": "no", "lr_scheduler_type": "constant", **given}
        trainer = maker(tmp_path, model=model, **given)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.accelerator.native_amp = True  # gradients are unscaled before they are clipped
        return trainer

    maker = Maker(None)
    scaled.watch = lambda: maker.watch
    return scaled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_gradients_that_stay_nan_end_the_run_with_the_weights_untouched_and_the_rows_named(optim, make_scaled):
    trainer = make_scaled(lambda model: spoil_gradients(model, range(12)), optim=optim)
    before = bits(trainer.model)
    with pytest.raises(NotFiniteError) as end:
        trainer.train()
    assert end.value.exit_code == 65
    assert trainer.state.global_step == 16  # at 2^16, 2^15, ... 2^1 a step was left out; at 2^0 it is the gradients
    assert bits(trainer.model) == before
    message = str(end.value)
    assert re.search(r"in step 17: loss \d\.\d+, gradient norm nan; rows \d+, \d+ of the training data", message)
    assert "The loss scale is 1, which is not the cause" in message


def test_the_search_for_a_scale_ends_no_run(make_scaled):
    trainer = make_scaled(lambda model: round_to_half(model, 2.0**-9), max_steps=20)
    trainer.train()
    assert trainer.state.global_step == 20
    weights = make_scaled.watch().weights
    taken = [step for step in range(1, 21) if weights[step] != weights[step - 1]]
    assert taken[0] > 8  # the steps before were left out
    assert len(taken) > 8
    assert trainer.accelerator.scaler.get_scale() == START / 2 ** (20 - len(taken))


# --- steps that are left out --------------------------------------------------------------------------------------


class TakesNoStep(TrainerCallback):
    """Throws the gradients of some steps away, so that the optimizer makes none."""

    def __init__(self, steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 in self.steps:
            kwargs["model"].zero_grad()


def left_out(trainer):
    return [entry["skipped_step"] for entry in trainer.state.log_history if "skipped_step" in entry]


def weights_at_end(make):
    return make.watch.weights[max(make.watch.weights)]


SKIP = {"nan_policy": "skip", "num_train_epochs": 2, "weight_decay": 0.1}


@pytest.mark.parametrize(("label", "kill_at"), [(NAN, 5), (INF, 3)])
def test_a_step_left_out_touches_nothing_and_a_killed_run_goes_on_as_if_it_had_not_been(
    label, kill_at, make, tmp_path, caplog
):
    whole = make(tmp_path / "whole", rows=make_rows(row7=label), **SKIP)
    whole.train()
    bad, expected = left_out(whole), weights_at_end(make)
    assert whole.state.global_step == 12
    assert len(bad) == 2  # once an epoch
    assert all(make.watch.weights[step] == make.watch.weights[step - 1] for step in bad)
    said = [message for message in caplog.messages if message.startswith("Left out: step")]
    assert all(re.search(r"rows (7, \d+|\d+, 7) of the training data", line) for line in said)
    assert len(said) == 2
    assert all(math.isfinite(entry["loss"]) for entry in whole.state.log_history if "loss" in entry)
    # The twin: the same steps, of rows that are well, without their gradients.
    twin = make(tmp_path / "twin", callbacks=[TakesNoStep(bad)], **{**SKIP, "nan_policy": "stop"})
    twin.train()
    assert weights_at_end(make) == expected
    make.killed(tmp_path / "killed", at=kill_at, rows=make_rows(row7=label), **SKIP)
    resumed = make(tmp_path / "killed", rows=make_rows(row7=label), resume="auto", **SKIP)
    resumed.train()
    assert make.watch.began_at == kill_at - 1  # behind the first step that was left out, and before it
    assert weights_at_end(make) == expected
    assert left_out(resumed) == bad
    assert [e["loss"] for e in resumed.state.log_history if "loss" in e] == [
        e["loss"] for e in whole.state.log_history if "loss" in e
    ]


def test_of_steps_in_a_row_as_many_are_left_out_as_allowed_and_a_continued_run_counts_on(make, tmp_path):
    rows = make_rows(**{f"row{i}": NAN for i in range(12)})
    given = {**SKIP, "nan_skip_limit": 3, "save_steps": 1}
    before = bits(make.template)
    message = stopped(make(tmp_path / "whole", rows=rows, **given), tmp_path)
    assert bad_step(message) == 4
    make.killed(tmp_path / "killed", at=2, rows=rows, **given)
    trainer = make(tmp_path / "killed", rows=rows, resume="auto", **given)
    message = stopped(trainer, tmp_path)
    assert make.watch.began_at == 1
    assert bad_step(message) == 4
    assert left_out(trainer) == [1, 2, 3]
    assert bits(trainer.model) == before


class Normalised(torch.nn.Module):
    """A head behind a batch norm, whose means a batch with NaN would spoil."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, input_ids=None, labels=None, attention_mask=None):
        values = self.head(self.norm(input_ids[:, :3].float() * labels[:, None]))
        return {"loss": (values.squeeze(1) - labels).square().mean(), "logits": values}


def test_means_of_a_batch_norm_are_as_before_a_step_that_was_left_out(make, tmp_path):
    trainer = make(tmp_path, model=Normalised(), rows=make_rows(row7=NAN), **SKIP)
    trainer.train()
    bad = left_out(trainer)
    assert len(bad) == 2
    assert all(make.watch.weights[step] == make.watch.weights[step - 1] for step in bad)
    assert make.watch.weights[12] != make.watch.weights[bad[-1] - 2]


def test_a_loss_that_is_no_number_is_left_out_under_a_loss_scale_which_is_not_changed_for_it(make_scaled):
    trainer = make_scaled(scale=8.0, rows=make_rows(row7=NAN), max_steps=12, nan_policy="skip")
    trainer.train()
    assert len(left_out(trainer)) == 2
    assert trainer.accelerator.scaler.get_scale() == 8.0
    overflows = make_scaled(lambda model: round_to_half(model, 2.0**-9), max_steps=12, nan_policy="skip")
    overflows.train()
    assert left_out(overflows) == []  # which is the scale's to find, by steps of its own
    assert overflows.accelerator.scaler.get_scale() < START
