"""`save_total_size_gb` while a run writes: what the folder holds, looked at every millisecond, is never above it."""

import itertools
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from closing_line import tally
from disk_runs import KINDS, hidden, make_esm, make_model, make_trainer, own_log
from disk_samples import allocated, sampled
from transformers import TrainerCallback

from hf_ext.errors import ArgumentError
from hf_ext.reporting.run_log import start_run_log
from hf_ext.trainer import FastTrainer

GB = 10**9
LIMITS, BEST = (1, 2, 3), (False, True)
COMBINATIONS = [*itertools.product(LIMITS, BEST, KINDS)]
SAMPLE = [(1, True, "full"), (2, False, "full"), (3, True, "lora"), (1, False, "lora"), (2, True, "frozen")]
SAMPLE += [(3, False, "frozen")]
BEST_SETTINGS = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
BEST_SETTINGS |= {"load_best_model_at_end": True}


@pytest.fixture(scope="module")
def counts(request):
    with tally(request, "disk budget", **{"saves": 0, "above the budget": 0, "samples": 0}) as found:
        yield found


@pytest.fixture(autouse=True)
def new_log():
    with own_log():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with an encoder of 6.5 MB and a head of 1 MB, so that what is counted is weights, not small files."""
    folder = tmp_path_factory.mktemp("base")
    make_esm(hidden_size=512, intermediate_size=512, num_hidden_layers=1).save_pretrained(folder)
    return folder


def build(folder, combination, base, trainer=FastTrainer, **given):
    limit, keeps_best, kind = combination
    model = make_model(kind, base) if kind != "full" else make_esm(hidden_size=256, num_hidden_layers=1)
    best = BEST_SETTINGS if keeps_best else {}
    settings = {"save_total_limit": limit, "save_steps": 1, "learning_rate": 1e-4, **best, **given}
    return make_trainer(folder, model, trainer, **settings)


def smallest_gb(refused):
    """Trains with far too little; the budget that the refusal names."""
    with pytest.raises(ArgumentError, match="cannot hold this run's checkpoints") as refusal:
        refused.train()
    return float(re.search(r"Smallest budget that works: --save_total_size_gb ([\d.]+\d)", str(refusal.value))[1])


class Killed(Exception):
    """What interrupts a run."""


class KillAt(TrainerCallback):
    """Raises in the step after `step`."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


class Saves(TrainerCallback):
    """Counts checkpoints that stand after their save."""

    def __init__(self):
        self.count = 0

    def on_save(self, args, state, control, **kwargs):
        self.count += (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()


def train_within(folder, combination, base, num_saves, counts, trainer=FastTrainer):
    """Trains and exports within the smallest budget that is allowed; (budget, most bytes seen, trainer)."""
    start_run_log(folder)
    gb = smallest_gb(build(folder, combination, base, save_total_size_gb=1e-6))
    saves = Saves()
    made = build(folder, combination, base, trainer, save_total_size_gb=gb, max_steps=num_saves, callbacks=[saves])
    with sampled(folder) as samples:
        made.train()
        made.save_model()
        made.save_state()
    assert saves.count == num_saves
    assert "was not written" not in (folder / "run.log").read_text()
    counts["saves"] += num_saves
    counts["above the budget"] += samples.peak_bytes > round(gb * GB)
    counts["samples"] += samples.num_samples
    return round(gb * GB), samples.peak_bytes, made


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("combination", "num_saves"),
    [*((each, 12) for each in SAMPLE), *(pytest.param(each, 50, marks=pytest.mark.nightly) for each in COMBINATIONS)],
    ids=str,
)
def test_a_run_never_holds_more_than_its_budget(combination, num_saves, tmp_path, base, counts):
    budget, peak, trainer = train_within(tmp_path, combination, base, num_saves, counts)
    assert allocated(str(tmp_path)) <= peak <= budget
    assert hidden(tmp_path) == []
    assert trainer.checkpoints.checkpoints()[-1].step == num_saves


class NoRoom(FastTrainer):
    """Rotates only after a save, as stock Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._ext_saver.retention.make_room = lambda: None


def test_the_samples_see_a_trainer_that_rotates_after_saving(tmp_path, base):
    counts = Counter()
    budget, peak, _ = train_within(tmp_path, (3, False, "full"), base, 6, counts, NoRoom)
    assert peak > budget
    assert counts["above the budget"] == 1


class LongLog(TrainerCallback):
    """As much in a step as others log in days."""

    def on_step_begin(self, args, state, control, **kwargs):
        state.log_history.append({"step": state.global_step, "text": "x" * 400_000})


def test_a_log_that_grows_counts_into_the_next_checkpoint(tmp_path, base):
    given = {"save_total_size_gb": 0.040, "max_steps": 12, "callbacks": [LongLog()]}
    trainer = build(tmp_path, (None, False, "full"), base, **given)
    with sampled(tmp_path) as samples:
        trainer.train()
    newest = trainer.checkpoints.checkpoints()[-1]
    assert newest.step == 12
    assert (newest.path / "trainer_state.json").stat().st_size > 3_000_000
    assert samples.peak_bytes <= 40_000_000


# --- the smallest budget --------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_is_too_small_is_refused_before_the_first_step_with_the_arithmetic(kind, tmp_path, base):
    combination = (2, True, kind)
    smallest = smallest_gb(build(tmp_path, combination, base, save_total_size_gb=1e-6))
    refused = build(tmp_path, combination, base, save_total_size_gb=0.999 * smallest)
    with pytest.raises(ArgumentError) as refusal:
        refused.train()
    assert refused.state.global_step == 0
    assert not [*tmp_path.glob("checkpoint-*")]
    lines = re.findall(r"^  (\S.*?) +([\d.]+) GB$", str(refusal.value), re.MULTILINE)
    names = ["all other files of the run", "checkpoint being written"]
    names += ["latest checkpoint, until the new one is verified", "best checkpoint"]
    assert [name for name, _ in lines] == [*names, "sum, at the moment of a save", "budget"]
    *parts, total, _ = [float(value) for _, value in lines]
    assert total == pytest.approx(sum(parts), abs=3e-6)
    assert total == pytest.approx(smallest, abs=3e-6)
    allowed = build(tmp_path, combination, base, save_total_size_gb=smallest, max_steps=2)
    assert allowed.train().global_step == 2


def test_the_budget_that_a_refusal_names_also_holds_for_the_same_command_again(tmp_path, base):
    start_run_log(tmp_path)  # it grows between two starts
    gb = smallest_gb(build(tmp_path, (1, True, "full"), base, save_total_size_gb=1e-6))
    for kill_at in (2, 4, None):
        kill = [] if kill_at is None else [KillAt(kill_at)]
        trainer = build(tmp_path, (1, True, "full"), base, save_total_size_gb=gb, resume="auto", callbacks=kill)
        with pytest.raises(Killed) if kill else nullcontext():
            trainer.train()
    trainer.save_model()
    assert allocated(str(tmp_path)) <= round(gb * GB)
