"""One training process of `test_stopping.py`: trains a tiny model, is signalled at a chosen event, reports what it did.

Runs in a process that the tests fork from one with everything imported, so that a case costs no imports.
"""

import fcntl
import hashlib
import json
import os
import resource
import signal
import sys
import termios
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path

from miniature_esm import make_narrow_esm
from ranks import become_rank, fork_ranks
from safetensors.torch import save
from token_rows import make_number_rows, stack_rows
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_ext.errors import TrainingStopped, exit_on_errors
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TERMINAL: list[int] = []  # the end of a process's terminal at which a person would sit
NUM_ROWS = 22  # 11 batches: with 3 micro-batches a step, the fourth and last step of an epoch has 2


@dataclass(frozen=True)
class Case:
    """What a process does: its arguments, and which signal it gets where. `at` is (event, how many of them)."""

    args: dict = field(default_factory=dict)
    at: tuple[str, int] | None = None
    signals: tuple[str, ...] = ("SIGTERM",)
    resume: bool = False
    eval_sets: int = 1
    early_stopping: int | None = None
    crash: bool = False  # instead of a signal, end without a word
    end: str = ""  # instead of a signal, what ends a run by itself, as `send` knows it, or "NaN"
    new_group: bool = False  # so that a signal can be sent to the process and all it started
    in_thread: bool = False
    terminal: bool = False  # of its own, which the signal "close" closes
    rank: int | None = None  # the rank that is signalled
    step_s: float = 0.0


class Trigger(TrainerCallback):
    """Sends this process its signals at the chosen event."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank, self.count = case, rank, 0

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: object.__getattribute__(self, "see")(name, state)
        return object.__getattribute__(self, name)

    def see(self, event, state):
        if event == "on_step_end":
            time.sleep(self.case.step_s)
        if self.case.at is None or event != self.case.at[0]:
            return
        if state.global_step == 0 and event != "on_prediction_step":
            return
        self.count += 1
        if self.count == self.case.at[1] and self.case.rank in (None, self.rank):
            send(self.case)


def send(case: Case) -> None:
    if case.crash:
        os._exit(9)
    workers = [child.pid for child in active_children()]
    if case.end == "worker":
        os.kill(workers[0], signal.SIGKILL)
    elif case.end == "workers":  # the other while the first is being named
        os.kill(workers[-1], signal.SIGKILL)
        threading.Timer(0.05, os.kill, (workers[0], signal.SIGKILL)).start()
    elif case.end == "file limit":  # as of `ulimit -f`: no batch fits into the memory that workers share
        for pid in workers:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (8, 8))
    elif case.end == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))  # messages fit, weights do not
    elif case.end == "memory":
        raise MemoryError("no room")
    elif case.end == "bug":
        raise KeyError("a bug")
    if case.end:
        return
    for name in case.signals:
        time.sleep(0.02)  # so that each is handled by itself
        if name == "close":
            os.close(TERMINAL.pop())
            continue
        os.kill(os.getpid(), getattr(signal, name))


class Collator:
    """Batches of ids; while it is saved with a checkpoint, the process may be signalled."""

    def __init__(self, case: Case):
        self.case, self.num_saves = case, 0

    def __call__(self, rows):
        return stack_rows(rows)

    def save_pretrained(self, folder):
        self.num_saves += 1
        if self.case.at == ("save", self.num_saves):
            send(self.case)


def make_trainer(folder: Path, case: Case, rank: int) -> FastTrainer:
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    fixed |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1}
    fixed |= {"learning_rate": 1e-2, "logging_steps": 3, "save_steps": 3, "seed": 3, "resume": "auto"}
    args = FastTrainingArguments(output_dir=str(folder), **{**fixed, **case.args})
    evals = {f"set{i}": make_number_rows(7, 10 + i) for i in range(case.eval_sets)}
    callbacks: list[TrainerCallback] = [Trigger(case, rank)]
    if case.early_stopping is not None:
        callbacks.append(EarlyStoppingCallback(case.early_stopping))
    return FastTrainer(
        make_narrow_esm(),
        args,
        Collator(case),
        make_number_rows(NUM_ROWS, 1, **({"row9": float("nan")} if case.end == "NaN" else {})),
        evals if case.eval_sets > 1 else evals["set0"],
        callbacks=callbacks,
    )


def run(folder: Path, case: Case, name: str, ranks: int, rank: int, port: int) -> None:
    """Body of a process: writes `NAME-RANK.json` and, its output, `NAME-RANK.txt`; exits as a recipe does."""
    if case.new_group:
        os.setpgrp()
    if case.terminal:
        open_terminal()
    become_rank(rank, port, ranks, None if case.terminal else folder / f"{name}-{rank}.txt")
    if case.in_thread:
        thread = threading.Thread(target=train, args=(folder, case, name, rank))
        thread.start()
        thread.join()
    else:
        with exit_on_errors() if case.end else nullcontext():
            train(folder, case, name, rank)


def open_terminal() -> None:
    """Gives this process a terminal; closing its other end sends SIGHUP, and what is written to it fails."""
    os.setsid()
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for descriptor in (1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    TERMINAL.append(ours)


def train(folder: Path, case: Case, name: str, rank: int) -> None:
    handlers = [signal.getsignal(number) for number in NUMBERS]
    trainer = make_trainer(folder / "run", case, rank)
    code = 0
    try:
        trainer.train(resume_from_checkpoint=case.resume or None)
    except TrainingStopped as error:
        code = error.exit_code
        print(error)
    tensors = {key: value.contiguous() for key, value in trainer.model.state_dict().items()}
    report = {
        "code": code,
        "reason": trainer.stop_reason,
        "step": trainer.state.global_step,
        "weights": hashlib.sha256(save(tensors)).hexdigest(),
        "history": [log for log in map(numbers, trainer.state.log_history) if log.keys() - {"step", "epoch"}],
        "best": [trainer.state.best_global_step, trainer.state.best_metric],
        "handlers_back": handlers == [signal.getsignal(number) for number in NUMBERS],
    }
    (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
    sys.exit(code)


def numbers(log: dict) -> dict:
    """What must not depend on whether a run was interrupted: no durations, no rates, no summary of one call."""
    if "train_runtime" in log:
        return {}
    return {key: log[key] for key in log if key in ("step", "epoch", "grad_norm", "learning_rate") or "loss" in key}


def start(folder: Path, case: Case, name: str, ranks: int = 1) -> list:
    """Starts a case in processes of its own."""
    return fork_ranks(run, ranks, folder, case, name, ranks)
