"""Processes that end in the middle of a training with data workers, as a recipe ends; each forked from one that has
everything imported. Run as a script, which reads a case a line: `FOLDER END WORKERS METHOD`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from locations import ROOT

TENSORS = ("input_ids", "attention_mask", "labels")


def collate(rows):
    import torch

    return {name: torch.tensor([row[name] for row in rows]) for name in TENSORS}


def end(name: str, args: Any) -> None:
    """Makes the training process end, or has it ended, from within a step."""
    from hf_ext.errors import MemoryExhausted

    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, name))
    elif name == "max_hours":
        args.max_hours = 1e-9
    elif name == "bug":
        raise KeyError("a bug")
    elif name == "memory":
        raise MemoryExhausted("no memory")
    elif name == "worker":
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    elif name == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))  # messages fit, weights do not


def train(folder: Path, name: str, workers: int, method: str) -> None:
    """Trains in this process until it ends, leaving when that began, and the processes that it had, in `began.json`."""
    from miniature_esm import make_narrow_esm
    from token_rows import make_number_rows
    from transformers import TrainerCallback

    from hf_ext.errors import exit_on_errors
    from hf_ext.trainer import FastTrainer
    from hf_ext.training_args import FastTrainingArguments

    rows = make_number_rows(60, 1)
    rows = rows.add_column("attention_mask", [[1] * 6] * len(rows))
    if name == "NaN":
        rows = rows.remove_columns("labels").add_column("labels", [1.0] * 8 + [float("nan")] * 52)

    class Ends(TrainerCallback):
        def see(self, event, args, state):
            if event != ("on_prediction_step" if name == "evaluation" else "on_step_end") or state.global_step != 3:
                return
            pids = [child.pid for child in psutil.Process().children(recursive=True)]
            (folder / "began.json").write_text(json.dumps({"at": time.time(), "pids": pids}))
            end("SIGTERM" if name == "evaluation" else name, args)

        def on_step_end(self, args, state, control, **kwargs):
            self.see("on_step_end", args, state)

        def on_prediction_step(self, args, state, control, **kwargs):
            self.see("on_prediction_step", args, state)

    lives_on = {} if method == "-" else {"dataloader_multiprocessing_context": method}
    stops = {"max_hours": 1.0} if name == "max_hours" else {}
    evaluates = {"eval_strategy": "steps", "eval_steps": 3} if name == "evaluation" else {}
    with exit_on_errors():
        args = FastTrainingArguments(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=2,
            save_steps=2,
            resume="auto",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=workers,
            **lives_on,
            **stops,
            **evaluates,
        )
        trainer = FastTrainer(make_narrow_esm(), args, collate, rows, rows.select(range(8)), callbacks=[Ends()])
        trainer.train()
    raise AssertionError("it did not end")


def main() -> None:
    import miniature_esm  # noqa: F401  the imports that each case would pay for
    import token_rows  # noqa: F401
    import torch

    import hf_ext.trainer  # noqa: F401

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        folder, name, workers, method = line.split()
        if os.fork() == 0:
            for descriptor, file in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(folder, file), os.O_WRONLY | os.O_CREAT), descriptor)
            train(Path(folder), name, int(workers), method)
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), flush=True)


class Endings:
    """The process that cases are forked from."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
        assert self._process.stdout.readline() == "ready\n"

    def run(self, folder: Path, name: str, workers: int, method: str = "-"):
        """(status, stderr, seconds from the event to the end, processes of its that are left)."""
        folder.mkdir(parents=True)
        self._process.stdin.write(f"{folder} {name} {workers} {method}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        began = json.loads((folder / "began.json").read_text()) if (folder / "began.json").exists() else None
        seconds = time.time() - began["at"] if began else 0.0
        ends = time.time() + 5  # which multiprocessing's own helpers have, that end when their pipes do
        pids = began["pids"] if began else []
        while any(map(psutil.pid_exists, pids)) and time.time() < ends:
            time.sleep(0.05)
        return status, (folder / "stderr").read_text(), seconds, [pid for pid in pids if psutil.pid_exists(pid)]

    def close(self) -> None:
        """Ends it, and whatever hangs in it."""
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main()
