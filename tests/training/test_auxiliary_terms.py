"""Auxiliary terms and drawn points in runs: alike for any accumulation, exact after a resume, in Trainer and ours."""

import pytest
from auxiliary_runs import CountsBatches, DrawsGlobally, Fast, Stock, difference, make_trainer

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
