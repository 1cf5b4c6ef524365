"""Auxiliary terms and drawn points in runs: alike for any accumulation, exact after a resume, in Trainer and ours."""

import pytest
from auxiliary_runs import CountsBatches, DrawsGlobally, Fast, Field, Stock, difference, make_trainer
from transformers import TrainerCallback

from hf_ext.models.auxiliary import OptimizerStep, compute_every
from hf_ext.trainer import FastTrainer

DUE = [0, 3, 6, 9]


@pytest.mark.parametrize("kind", [Fast, Stock])
def test_the_term_is_due_by_optimizer_steps_in_all_micro_batches_and_evaluations_are_whole(tmp_path, kind):
    trainer = make_trainer(kind, tmp_path, accumulation=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.due == [step for step in DUE for _ in range(4)]
    trainer.state.global_step = 1  # at which the term is not due
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"] != before
    loss = trainer.evaluate()["eval_loss"]
    trainer.state.global_step = 3
    assert trainer.evaluate()["eval_loss"] == loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Fast, CountsBatches, DrawsGlobally])
def test_one_pass_and_four_passes_a_step_train_the_same_weights(tmp_path, kind):
    runs = [make_trainer(kind, tmp_path / str(n), accumulation=n) for n in (1, 4)]
    for run in runs:
        run.train()
    apart = difference(runs[0].model, runs[1].model)
    assert apart < 1e-5 if kind is Fast else apart > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "step"), [(Fast, 6), (Fast, 7), (CountsBatches, 6)])  # in 6 the term is due
def test_a_run_goes_on_bit_for_bit_where_the_term_is_due_and_where_it_is_not(tmp_path, kind, step):
    whole = make_trainer(kind, tmp_path / "whole", accumulation=2, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = make_trainer(kind, tmp_path / "resumed", accumulation=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    if kind is CountsBatches:
        assert difference(whole.model, resumed.model) > 1e-4
        return
    assert sorted(set(resumed.due)) == [due for due in DUE if due >= step]
    assert difference(whole.model, resumed.model) == 0.0


def test_a_model_that_is_given_the_step_has_the_term_in_its_own_forward(tmp_path):
    class WithTerm(Field):
        def __init__(self):
            super().__init__()
            self.clock = OptimizerStep()

        def forward(self, places, labels, row=None):
            found = super().forward(places, labels, with_inverse=True)
            due = compute_every(3, lambda: found["term"], step=self.clock.taken, training=self.training)
            seen.append((self.clock.taken, float(due) != 0.0))
            return {"loss": found["loss"] + due}

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    seen = []
    trainer = make_trainer(FastTrainer, tmp_path, accumulation=2, model=WithTerm(), callbacks=[Ends()])
    trainer.add_callback(trainer.model.clock)
    seen.clear()
    trainer.train()
    assert seen[-8:] == [(step, step % 3 == 0) for step in range(4) for _ in range(2)]
