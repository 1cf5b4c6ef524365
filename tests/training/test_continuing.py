"""A run that was killed and continued is the run that was not, bit for bit; what cannot be continued so is said."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from continued_runs import EVALUATING, interrupt, same, train
from resuming_runs import NUM_ROWS, Case, Runs, differences
from torch.utils.data import DataLoader
from train_until_stopped import Collator
from transformers import TrainerCallback

from hf_ext.trainer import FastTrainer

EVALUATED = (("eval_strategy", "steps"), ("eval_steps", 2))
STOPPING = (
    *EVALUATED[:1],
    ("eval_steps", 3),
    ("save_steps", 3),
    ("patience", 2),
    ("metric_for_best_model", "loss"),
    ("load_best_model_at_end", True),
    ("learning_rate", 0.1),
)
LOGGING = (("logging_steps", 3),)  # the step saved falls between two logs
WORKERS, ACCUMULATION = (0, 2), (1, 2, 5)
LOADING = (("speedups", ("data_loading",)), *EVALUATED)
CACHED = (("speedups", ("data_loading", "embedding_cache")), *EVALUATED)

LEARNING = (  # other steps, or less kept
    (("speedups", ("attention", "packing", "muon")), ("learning_rate", 1e-3)),
    (("optim", "adafactor"),),
    (("activation_checkpointing", True),),
    (("speedups", ("all",)), ("without", ("precision", "cpu_matmul", "cpu_threads", "compile"))),
)
CLIPPED = (("max_grad_norm", 0.3), ("encoder_learning_rate", 1e-3))
EIGHT_BITS = [
    (("optim", "adamw_8bit"), *CLIPPED),
    *((("optim", f"{name}_8bit"),) for name in ("paged_adamw", "lion", "ademamix")),
]
if find_spec("bitsandbytes") is None:
    EIGHT_BITS = []


def over(
    data: str, task: str = "masked", accumulation=ACCUMULATION, save_step: int = 0, given=(), workers=WORKERS
) -> list[Case]:
    return [Case(data, task, number, steps, save_step, given) for steps in accumulation for number in workers]


CASES = [
    *over("map"),
    *over("stream"),
    *over("stream", accumulation=(1, 2), save_step=3),  # in the first pass
    *over("stream", accumulation=(5,), save_step=1),
    *over("shuffled stream"),
    *over("packed"),
    *over("token budget"),
    *over("grouped"),
    *over("cached", "regression"),
    *over("map", "lora", (1, 2)),
    *over("grouped", "lora", (2,)),
    *over("map", given=EVALUATED, accumulation=(2,)),
    *over("stream", "lora", (2,)),
    *over("map", accumulation=(2,), save_step=4),  # the short last step of the first epoch
    *over("cached", "regression", (1,), 6, STOPPING),
    *over("map", given=LOGGING, accumulation=(2,)),
    *over("stream", given=LOGGING, accumulation=(1,)),
    *over("map", "lora", (1,), given=LOADING, workers=(1, 2)),
    *over("map", "lora", (2,), save_step=4, given=LOADING, workers=(2,)),  # the last step of the first epoch
    *over("grouped", "lora", (2,), given=LOADING, workers=(2,)),
    *over("stream", "lora", (1,), given=LOADING, workers=(2,)),
    *over("cached", "regression", (1,), given=CACHED, workers=(1, 2)),
    *over("token budget", given=LOADING, accumulation=(2,), workers=(2,)),
    *(case for given in LEARNING for case in over("packed", given=given, accumulation=(2,), workers=(0,))),
    *(case for given in EIGHT_BITS for case in over("map", given=given, accumulation=(2,), workers=(0,))),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_affinity, demo_rows):
    return Runs(tmp_path_factory.mktemp("runs"), make_affinity, demo_rows)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_killed_and_resumed_run_is_the_run_that_was_not_killed(case, runs, blocked_in_float32):
    whole = runs.whole(case)
    killed = runs.interrupt(case)
    resumed = runs.resume(case, killed)
    assert whole.state.global_step > case.step + 1
    assert differences(resumed, whole) == []
    seen = {**{step: rows for step, rows in killed.seen.items() if step < case.step}, **resumed.seen}
    assert min(resumed.seen) == case.step
    assert seen == whole.seen
    in_order = [row for step in sorted(seen) for row in seen[step]]
    passes = [in_order[i : i + NUM_ROWS] for i in range(0, len(in_order), NUM_ROWS)]
    assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in passes[: len(in_order) // NUM_ROWS])


class LosesStates(TrainerCallback):
    """Zeroes the first moments that the optimizer took from the checkpoint."""

    def on_train_begin(self, args, state, control, optimizer, **kwargs):
        self.left = [entry["exp_avg" if "exp_avg" in entry else "state1"] for entry in optimizer.state.values()]
        for moments in self.left:
            moments.zero_()


@pytest.mark.parametrize("case", [Case("map"), *(Case("map", given=given) for given in EIGHT_BITS[:1])], ids=str)
def test_the_comparison_sees_a_resume_that_forgets_rows_or_moments(case, runs, blocked_in_float32):
    whole, killed, loses = runs.whole(case), runs.interrupt(case), LosesStates()
    assert "weights" in differences(runs.resume(case, killed, ignore_data_skip=True), whole)
    assert "weights" in differences(runs.resume(case, killed, loses), whole)
    assert loses.left


class Masking(Collator):
    """As transformers' collator for masked language models says that it masks."""

    mlm = True


@pytest.mark.nightly
def test_with_workers_that_are_spawned_a_continued_run_is_the_whole_one(tmp_path):
    spawned = interrupt(tmp_path / "spawned", dataloader_multiprocessing_context="spawn")
    assert same(spawned, train(tmp_path / "whole"))


def test_workers_do_not_live_on(tmp_path, caplog):
    whole = train(tmp_path / "whole", **EVALUATING)
    asked = {**EVALUATING, "dataloader_persistent_workers": True}
    assert same(interrupt(tmp_path / "killed", **asked), whole)
    assert "dataloader_persistent_workers is off" in caplog.text


class OwnLoader(FastTrainer):
    def get_train_dataloader(self):
        own = {"collate_fn": self.data_collator, "num_workers": 1, "persistent_workers": True}
        return DataLoader(self.train_dataset, 2, generator=torch.Generator().manual_seed(7), shuffle=True, **own)


class Reversed(FastTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return [*range(len(self.train_dataset))][::-1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, []),
        ({"collator": Masking}, ["Masking draws masks at random"]),
        ({"trainer": Reversed}, ["The order of rows is the class's own"]),
        ({"trainer": OwnLoader}, ["The order of rows is the class's own", "live on (persistent_workers)"]),
    ],
)
def test_what_a_continued_run_cannot_go_on_with_exactly_is_said(tmp_path, caplog, asked, words):
    train(tmp_path, kill_at=3, **asked)
    assert "if it had not ended" not in caplog.text
    train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **asked)
    assert caplog.text.count("if it had not ended") == len(words)
    assert all(said in caplog.text for said in words)


@pytest.mark.nightly
def test_the_evaluation_on_start_is_not_repeated_when_a_run_is_continued(tmp_path):
    asked = {**EVALUATING, "eval_on_start": True}
    whole = train(tmp_path / "whole", **asked)
    resumed = interrupt(tmp_path / "killed", **asked)
    evaluated = [[e["step"] for e in run.state.log_history if "eval_loss" in e] for run in (whole, resumed)]
    assert evaluated == [[0, 2, 4, 6, 8]] * 2
    assert same(resumed, whole)


def test_the_mean_loss_of_a_continued_run_is_that_of_its_own_steps(tmp_path):
    whole = train(tmp_path / "whole", dataloader_num_workers=0)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    ours = interrupt(tmp_path / "ours", dataloader_num_workers=0, logging_steps=100)
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(np.mean(losses[2:]), rel=1e-5)
    again = train(tmp_path / "ours", dataloader_num_workers=0, logging_steps=100, resume="auto")
    assert again.state.log_history[-1]["train_loss"] == 0.0


def test_a_best_checkpoint_in_the_folder_that_a_run_continues_from_is_loaded_at_the_end(tmp_path):
    best = {**EVALUATING, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    best |= {"dataloader_num_workers": 0}
    whole = train(tmp_path / "whole", **best)
    assert whole.state.best_global_step == 2
    train(tmp_path / "old", kill_at=5, **best)
    ours = train(tmp_path / "new", resume=str(tmp_path / "old" / "checkpoint-4"), **best)
    assert ours.state.best_model_checkpoint == str(tmp_path / "old" / "checkpoint-2")
    assert same(ours, whole)
