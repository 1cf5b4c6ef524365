"""Two runs that are given one folder: one is refused, and the other ends as if it had been alone."""

import os
import sys
import time
import traceback

import pytest
from closing_line import tally
from faulty_runs import Maker, bits, contents, names
from miniature_esm import make_narrow_esm
from other_runs import other_run
from transformers import TrainerCallback

from hf_ext.checkpoints.run_lock import LOCK, run_folder
from hf_ext.errors import FolderError

LIMIT_S = 60
REFUSED = 3
PAIRS = [(0.0, 1), (0.02, 2), (0.05, 3), (0.1, 4), (0.2, 5), (0.4, 6), (0.8, "end"), (1.2, 1), (2.0, 4), (3.0, "end")]


class WaitForTheOther(TrainerCallback):
    """Waits at a step, or at the end of training, until the other run of the pair has ended."""

    def __init__(self, flag, at):
        self.flag, self.at = flag, at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.wait()

    def on_train_end(self, args, state, control, **kwargs):
        if self.at == "end":
            self.wait()

    def wait(self) -> None:
        ends = time.monotonic() + LIMIT_S
        while not self.flag.exists() and time.monotonic() < ends:
            time.sleep(0.01)


def train(folder, seed, flag, at) -> dict[str, bytes]:
    """What a recipe does: the folder is the run's from before the trainer is made until the model is saved."""
    trainer = Maker(make_narrow_esm())(folder, seed=seed, resume="auto", callbacks=[WaitForTheOther(flag, at)])
    with run_folder(trainer.args):
        trainer.train()
        trainer.save_model()
    return bits(trainer.model)


def start(folder, seed, flag, at) -> int:
    """A process that trains; it ends with 0, or with REFUSED."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(folder, seed, flag, at)
            status = 0
        except FolderError:
            status = REFUSED
        except BaseException:
            traceback.print_exc()  # this process never comes back to pytest
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def run_pair(folder, delay_s, at) -> tuple[dict[int, int], dict[str, bytes | str]]:
    """Seeds 1 and 2, the second later; seed -> status, and what is in the folder."""
    flag = folder / "one has ended"
    seeds = {start(folder / "run", 1, flag, at): 1}
    time.sleep(delay_s)
    seeds[start(folder / "run", 2, flag, at)] = 2
    ended = {}
    for _ in range(2):
        pid, status = os.waitpid(-1, 0)
        ended[seeds[pid]] = os.waitstatus_to_exitcode(status)
        flag.touch()
    return ended, contents(folder / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, dict[str, bytes | str]]:
    """What each seed leaves that nobody disturbs."""
    left = {}
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"seed-{seed}")
        (folder / "flag").touch()
        train(folder / "run", seed, folder / "flag", 1)
        left[seed] = contents(folder / "run")
    assert left[1]["model.safetensors"] != left[2]["model.safetensors"]
    return left


@pytest.fixture(scope="module")
def counts(request):
    with tally(request, "two runs in one folder", pairs=0, one_refused=0, other_unharmed=0) as found:
        yield found


@pytest.mark.parametrize(
    ("delay_s", "at"), [PAIRS[4], *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in PAIRS)]
)
def test_one_of_two_runs_is_refused_and_the_other_unharmed(alone, counts, tmp_path, delay_s, at):
    ended, left = run_pair(tmp_path, delay_s, at)
    counts["pairs"] += 1
    assert sorted(ended.values()) == [0, REFUSED]
    counts["one_refused"] += 1
    whole = alone[min(ended, key=ended.get)]
    assert left.keys() == whole.keys()
    weights = [name for name in left if name.endswith(".safetensors") and not name.startswith("rank")]
    assert len(weights) >= 4
    assert {name: left[name] for name in weights} == {name: whole[name] for name in weights}
    counts["other_unharmed"] += 1


# --- trainers without a recipe ----------------------------------------------------------------------------------------


class LookAt(TrainerCallback):
    """Notes what the folder holds during training, and whether another process could have it."""

    def __init__(self, folder):
        self.folder, self.seen, self.refused = folder, [], 0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append((self.folder / LOCK).is_file())
        if state.global_step == 3:
            pid = start(self.folder, 7, self.folder / "none", 99)
            self.refused += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == REFUSED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [{}, {"dataloader_num_workers": 1}])
def test_trainers_one_after_the_other_share_a_folder_and_none_leaves_a_lock(tmp_path, given):
    make, look = Maker(make_narrow_esm()), LookAt(tmp_path / "run")
    first = make(tmp_path / "run", callbacks=[look], **given)
    first.train()
    first.train()
    second = make(tmp_path / "run", seed=4, callbacks=[look], **given)  # while the first is not ended
    second.train()
    first.save_model()
    second.save_model()
    assert look.seen == [True] * 18
    assert look.refused == 3
    assert LOCK not in names(tmp_path / "run")


def test_a_trainer_that_only_evaluates_needs_no_folder_and_writes_none_of_anothers(tmp_path):
    make = Maker(make_narrow_esm())
    make(tmp_path / "run").train()
    with other_run(tmp_path / "run"):
        before = contents(tmp_path / "run")
        trainer = make(tmp_path / "run", eval_dataset=make(tmp_path / "x").train_dataset)
        assert trainer.evaluate()["eval_loss"] > 0
        for refused in (trainer.train, trainer.save_model):
            with pytest.raises(FolderError, match="in use by another run"):
                refused()
        assert contents(tmp_path / "run") == before
        trainer.save_model(str(tmp_path / "elsewhere"))
