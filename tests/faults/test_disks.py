"""Disks that are full, small, over quota or broken: training goes on, the checkpoint before stays, the budget holds."""

import errno
import itertools
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from disk_samples import allocated, sampled
from run_outcomes import KillAt, Killed
from safetensors import SafetensorError
from small_disks import (
    KINDS,
    NUM_STEPS,
    ArmAt,
    Digests,
    Faults,
    SmallDisk,
    digest,
    fill,
    hidden,
    make_esm,
    make_model,
    make_trainer,
    own_log,
    small_disk,
)
from transformers import EsmForSequenceClassification, TrainerCallback

from hf_ext.checkpoints import CheckpointStore
from hf_ext.errors import ArgumentError, DiskFailure, exit_on_errors
from hf_ext.text import start_run_log
from hf_ext.trainer import FastTrainer

# Free room, in checkpoints, beside what else a run writes, and the checkpoints that stand at the end. Where there is no
# room for a checkpoint with its margin of 1 MiB (here 0.8 checkpoints), older ones go, but never the newest.
ROOM = {
    0.0: [],
    0.3: [],
    0.98: [],
    1.02: [2],
    1.5: [2],
    1.97: [2],
    2.03: [2, 4],
    2.5: [2, 4],
    2.9: [6, 8],
    3.5: [6, 8],
    4.1: [4, 6, 8],
    6.0: [2, 4, 6, 8],
}
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
# (what fails, with what, whether once or from then on)
INJECTED = [*itertools.product(Faults.PLACES, ERRORS, (True, False))]
SAMPLE = [(place, ERRORS[(i + j) % 4], j == 0) for i, place in enumerate(Faults.PLACES) for j in (0, 1)]
FAIL_AT = 4  # the second save
TORCH = r"torch could not write a file whole \(a full disk, or ulimit -f\)"  # of optimizer.pt: there is no errno


@pytest.fixture(autouse=True)
def new_log():
    with own_log():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run on a disk with room: (hashes of its weights by step, bytes of a checkpoint, bytes of all else)."""
    folder, digests = tmp_path_factory.mktemp("whole"), Digests()
    trainer = make_trainer(folder, callbacks=[digests])
    trainer.train()
    sizes = [stored.num_bytes for stored in trainer.checkpoints.checkpoints()]
    return digests.by_step, max(sizes), allocated(str(folder)) - sum(sizes)


@pytest.fixture(scope="module")
def may_mount(tmp_path_factory):
    return SmallDisk.is_allowed(tmp_path_factory.mktemp("probe"))


def run(folder, trainer=FastTrainer, **given):
    """Trains as a recipe does; (hash of the weights by step, exit status, what ended it)."""
    digests = Digests()
    made = make_trainer(folder, trainer=trainer, **{**given, "callbacks": [digests, *given.get("callbacks", [])]})
    try:
        with exit_on_errors():
            made.train()
    except SystemExit as end:
        return digests.by_step, end.code, end.__context__
    return digests.by_step, 0, None


def steps(folder):
    """Steps of the checkpoints that verify."""
    store = CheckpointStore(folder)
    names = [path.name for path in folder.glob("checkpoint-*")]
    return sorted(store.open(folder / name).step for name in names)


def check_message(text, folder, reason=r"\w.+"):
    found = re.search(
        rf"{re.escape(str(folder))} could not be written: {reason}\. "
        r"([\d,]+) bytes are needed, (?:[\d,]+ bytes are free|free bytes cannot be told)",
        text,
    )
    assert found, text
    assert int(found[1].replace(",", "")) > 1_000_000


def check_resumes(folder, whole):
    weights, code, _ = run(folder, resume="auto")
    assert code == 0
    assert hidden(folder) == []
    assert weights == {step: whole[0][step] for step in weights}
    assert weights or steps(folder)[-1] == NUM_STEPS


@pytest.mark.sampled(12)
@pytest.mark.parametrize("room", ROOM)
def test_a_small_disk_costs_checkpoints_but_no_training_and_not_the_one_before(
    room, tmp_path, whole, may_mount, caplog
):
    _, checkpoint_bytes, other_bytes = whole
    if not may_mount:
        pytest.skip("mounting a tmpfs is not allowed here")
    with small_disk(tmp_path / "disk", int(other_bytes + room * checkpoint_bytes)) as disk:
        folder = disk.folder / "run"
        weights, code, end = run(folder)
        assert steps(folder) == ROOM[room]
        assert hidden(folder) == []
        has_ended = len(ROOM[room]) < 2
        assert (code, type(end)) == ((74, DiskFailure) if has_ended else (0, type(None)))
        if room < 2.9:
            reason = f"(?:No space left on device|{TORCH})"
            check_message(str(end) if has_ended else caplog.text, folder, reason)
            before = f"checkpoint-{ROOM[room][-1]} is valid" if ROOM[room] else "no checkpoint was saved yet"
            assert f"Training goes on; {before}." in caplog.text
        assert weights == {step: whole[0][step] for step in range(1, 7 if not ROOM[room] else 9)}
        disk.remount("size=64m")
        check_resumes(folder, whole)


def check_injected(place, number, once, folder, whole, caplog, monkeypatch, trainer=FastTrainer):
    with monkeypatch.context() as patch:
        faults = Faults(place, number, patch)
        arm = ArmAt(faults, FAIL_AT, once)
        limit = 1 if place == "deletion" else None
        weights, code, end = run(folder, trainer, callbacks=[arm], save_total_limit=limit)
        faults.is_armed = False
        assert faults.count > 0
        reason = os.strerror(number)
        if place == "deletion":  # that is no reason to stop: the checkpoint is written
            assert (code, steps(folder)) == (0, [8])
            left = [".trash-checkpoint-2"] if once else [".trash-checkpoint-2", ".trash-checkpoint-4"]
            assert sorted(arm.left[7]) == left
            assert f"could not be deleted: {reason}. The next start tries again." in caplog.text
        else:
            assert arm.newest[FAIL_AT + 1] == 2
            assert arm.left[FAIL_AT + 1] == hidden(folder) == []
            assert (code, steps(folder)) == ((0, [2, 6, 8]) if once else (74, [2]))
            assert isinstance(end, type(None) if once else DiskFailure)
            reason = TORCH if place == "optimizer" else re.escape(reason)
            check_message(caplog.text if once else str(end), folder, reason)
        assert weights == whole[0]
        check_resumes(folder, whole)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("place", "number", "once"), [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.nightly) for case in INJECTED)]
)
def test_an_error_anywhere_in_a_save_costs_that_checkpoint_alone(
    place, number, once, tmp_path, whole, caplog, monkeypatch
):
    check_injected(place, number, once, tmp_path, whole, caplog, monkeypatch)


def test_failures_that_are_not_in_a_row_do_not_end_a_run(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        arm = ArmAt(Faults("weights", errno.ENOSPC, patch), 1, only_once=False, but_not=(2, 3, 6, 7))
        weights, code, _ = run(tmp_path, callbacks=[arm], save_steps=1)
    assert (code, weights) == (0, whole[0])
    assert steps(tmp_path) == [2, 3, 6, 7]


class Stop(TrainerCallback):
    """Sends SIGTERM in optimizer step 4."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["weights", "rename"])
def test_a_stop_that_cannot_save_says_so_instead_of_having_saved(place, tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        arm = ArmAt(Faults(place, errno.ENOSPC, patch), 4, only_once=False)
        weights, code, end = run(tmp_path, callbacks=[arm, Stop()])
        assert (code, type(end)) == (74, DiskFailure)
        assert max(weights) == 4
        check_message(str(end), tmp_path)
    assert (steps(tmp_path), hidden(tmp_path)) == ([2], [])
    check_resumes(tmp_path, whole)


@pytest.fixture
def full_at_the_end(tmp_path, may_mount):
    """A trainer that has trained on a disk that was filled up since."""
    if not may_mount:
        pytest.skip("mounting a tmpfs is not allowed here")
    with small_disk(tmp_path / "disk", 8_000_000) as disk:
        trainer = make_trainer(disk.folder / "run", save_total_limit=1)
        trainer.train()
        fill(disk.folder / "filler")
        yield trainer, disk


def test_a_trained_model_that_finds_no_room_ends_as_a_disk_failure_that_says_what_to_do(full_at_the_end):
    trainer, disk = full_at_the_end
    folder = disk.folder / "run"
    with pytest.raises(DiskFailure, match=r"No space left on device\..* bytes are free") as caught:
        trainer.save_model()
    assert str(folder) in str(caught.value)
    assert "--resume auto" in str(caught.value)
    assert hidden(folder) == []
    (disk.folder / "filler").unlink()
    again = make_trainer(folder, save_total_limit=1, resume="auto")
    again.train()
    again.save_model()
    again.save_state()
    saved = EsmForSequenceClassification.from_pretrained(folder)
    assert digest(saved) == digest(trainer.model)


def test_reports_that_find_no_room_cost_no_training_and_no_traceback(full_at_the_end, whole, capsys):
    _, disk = full_at_the_end
    start_run_log(disk.folder / "other")
    weights, code, _ = run(disk.folder / "other", save_strategy="no", preset="baseline")
    assert (code, weights) == (0, whole[0])
    printed = capsys.readouterr()
    assert "plan.json was not written: " in printed.out
    assert "throughput.json was not written: No space left on device." in printed.out
    assert printed.err.count("run.log could not be written: No space left on device. Lines are missing.") == 1
    assert "Traceback" not in printed.err + printed.out


@pytest.mark.parametrize("number", ERRORS)
def test_any_other_write_that_the_disk_refuses_has_the_same_exit_status(number):
    with pytest.raises(SystemExit) as end, exit_on_errors():
        raise OSError(number, os.strerror(number), "predictions.csv")
    assert end.value.code == 74
    with pytest.raises(SystemExit) as end, exit_on_errors():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert end.value.code == DiskFailure.exit_code
    with pytest.raises(SafetensorError), exit_on_errors():
        raise SafetensorError("Error while deserializing header: incomplete metadata")
    with pytest.raises(FileNotFoundError), exit_on_errors():
        raise FileNotFoundError(errno.ENOENT, "x", "data.csv")


class Untidy(FastTrainer):
    """Leaves what it began to write."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.checkpoints.abandon = lambda step: None


def test_the_harness_sees_what_a_broken_trainer_does_wrong(tmp_path, whole, caplog, monkeypatch):
    with pytest.raises(AssertionError):
        check_injected("weights", errno.ENOSPC, False, tmp_path, whole, caplog, monkeypatch, Untidy)


GB = 10**9
LIMITS, BEST = (1, 2, 3), (False, True)
COMBINATIONS = [*itertools.product(LIMITS, BEST, KINDS)]
BUDGETS = [(1, True, "full"), (2, False, "full"), (3, True, "lora"), (1, False, "lora"), (2, True, "frozen")]
BUDGETS += [(3, False, "frozen")]
BEST_SETTINGS = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
BEST_SETTINGS |= {"load_best_model_at_end": True}


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


class Saves(TrainerCallback):
    """Counts checkpoints that stand after their save."""

    def __init__(self):
        self.count = 0

    def on_save(self, args, state, control, **kwargs):
        self.count += (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()


def train_within(folder, combination, base, num_saves, trainer=FastTrainer):
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
    return round(gb * GB), samples.peak_bytes, made


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("combination", "num_saves"),
    [*((each, 12) for each in BUDGETS), *(pytest.param(each, 50, marks=pytest.mark.nightly) for each in COMBINATIONS)],
    ids=str,
)
def test_a_run_never_holds_more_than_its_budget(combination, num_saves, tmp_path, base):
    budget, peak, trainer = train_within(tmp_path, combination, base, num_saves)
    assert allocated(str(tmp_path)) <= peak <= budget
    assert hidden(tmp_path) == []
    assert trainer.checkpoints.checkpoints()[-1].step == num_saves


class NoRoom(FastTrainer):
    """Rotates only after a save, as stock Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._ext_parts.saver.retention.make_room = lambda: None


def test_the_samples_see_a_trainer_that_rotates_after_saving(tmp_path, base):
    budget, peak, _ = train_within(tmp_path, (3, False, "full"), base, 6, NoRoom)
    assert peak > budget


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
        kill = [] if kill_at is None else [KillAt(kill_at + 1)]
        trainer = build(tmp_path, (1, True, "full"), base, save_total_size_gb=gb, resume="auto", callbacks=kill)
        with pytest.raises(Killed) if kill else nullcontext():
            trainer.train()
    trainer.save_model()
    assert allocated(str(tmp_path)) <= round(gb * GB)
