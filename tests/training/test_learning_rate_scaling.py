"""`--lr_scaling`: the rates that the optimizer has are the given ones times what the rows of a step ask for, once."""

import pytest
import torch
from any_models import bert, rows_of_tokens
from run_outcomes import KillAt, Killed
from tiny_masked_lm import make_args
from transformers import TrainerCallback

from hf_ext.arguments import parse_command
from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SCALED = {"lr_scaling": "linear", "lr_base_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
WARM = {"warmup_steps": 2, "max_steps": 4}


class Rates(TrainerCallback):
    """Of each step, those of the optimizer's groups when it takes it."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.found.append(sorted({group["lr"] for group in optimizer.param_groups}))


def train(folder, args=None, kill_at=None, resume=None, **given):
    torch.manual_seed(0)
    rates = Rates()
    callbacks = [rates] if kill_at is None else [rates, KillAt(kill_at)]
    args = make_args(folder, **given) if args is None else args
    trainer = FastTrainer(bert(), args, train_dataset=rows_of_tokens(32), callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Killed:
        assert kill_at is not None
    return trainer, rates.found


def test_after_warm_up_all_groups_have_their_rate_times_the_rows_over_the_base(tmp_path):
    # 4 rows x 2 passes are 8 rows, 4 times the base: 1e-3 x 4 = 4e-3, and the encoder's 5e-4 x 4 = 2e-3.
    trainer, rates = train(tmp_path, **SCALED, **WARM, encoder_learning_rate=5e-4)
    assert rates[2] == [2e-3, 4e-3]
    assert rates[1] == [1e-3, 2e-3]  # half of it within warm-up
    assert trainer.plan["lr_scaling"].reason == (
        "learning_rate 0.001 x 4 = 0.004, encoder_learning_rate 0.0005 x 4 = 0.002: 8 rows per step over 2, linear"
    )
    _, rates = train(tmp_path / "root", **{**SCALED, "lr_scaling": "sqrt"}, **WARM)
    assert rates[2] == [2e-3]
    _, rates = train(tmp_path / "as given", learning_rate=1e-3, gradient_accumulation_steps=2, **WARM)
    assert rates[2] == [1e-3]


def test_the_rows_are_those_of_the_effective_batch(tmp_path):
    given = {"effective_batch_size": 8, "lr_scaling": "linear", "lr_base_batch_size": 16, "learning_rate": 1e-3}
    trainer, rates = train(tmp_path, **given, max_steps=1)
    assert rates == [[5e-4]]
    assert trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps == 8


def test_neither_a_second_trainer_nor_a_continued_run_scales_twice(tmp_path):
    args = make_args(tmp_path / "twice", **SCALED, **WARM)
    assert train(tmp_path, args)[1] == train(tmp_path, args)[1]
    assert args.learning_rate == 1e-3
    saving = {"save_strategy": "steps", "save_steps": 2, **SCALED, **WARM}
    whole, rates = train(tmp_path / "whole", **saving)
    train(tmp_path / "killed", kill_at=4, **saving)
    resumed, others = train(tmp_path / "killed", resume="auto", **saving)
    assert others == rates[2:]
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_leaves_rows_or_rates_open_is_refused(tmp_path):
    for words in (["--lr_scaling", "sqrt"], ["--lr_base_batch_size", "16"]):
        with pytest.raises(ArgumentError, match="lr_scaling and lr_base_batch_size need each other: give both"):
            parse_command((FastTrainingArguments,), {}, None, words)
    for given, words in (
        ({"max_tokens_per_batch": 64}, "rows per step vary"),
        ({"auto_find_batch_size": True}, "rows per step vary"),
        ({"without": ["lr_scaling"]}, "leaves it out"),
    ):
        with pytest.raises(PlanRefused, match=words):
            train(tmp_path, **SCALED, **given)
    model = bert()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ArgumentError, match="given an optimizer, which has its own rate"):
        FastTrainer(model, make_args(tmp_path, **SCALED), train_dataset=rows_of_tokens(), optimizers=(own, None))
