"""What every kind of run writes about itself, for `all_results.json`, the report and the model card."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from ..arguments import is_secret
from ..files import Facts, Json
from ..hardware import detect_hardware
from ..optional import installed_version
from ..startup import end_phases, program_words
from .record import FORMAT, CommonRecord, Costs, Environment, ModelRecord

PACKAGES = ("hf_ext", "torch", "transformers", "accelerate", "datasets", "peft")
# What is either a Hub id or a path, which nothing but the file system tells apart.
SOURCES = ("dataset_name", "model_name_or_path", "encoders", "init_head_from")


class RunClockCallback(TrainerCallback):
    """Counts seconds of training and sessions (calls of `train`); a resumed run counts on.

    Both are in every checkpoint, but not in `trainer_state.json`, which is the same for two runs that learn the same.
    What a kill cost after the last checkpoint is not counted: that session could not write it down any more.
    """

    name = "run_clock"

    def __init__(self) -> None:
        self.seconds_before = 0.0
        self.num_sessions = 0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Of training, evaluations and saves included, loading and scoring not."""
        return self.seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def on_train_begin(self, *event: object, **kwargs: object) -> None:
        """Starts the clock, after a resumed run has got its state back."""
        self._began = time.monotonic()
        self.num_sessions += 1

    def on_train_end(self, *event: object, **kwargs: object) -> None:
        """Stops the clock: the time after it is not training."""
        self.seconds_before = self.seconds
        self._began = None

    def state(self) -> Json:
        """Returns what a checkpoint keeps, JSON-able."""
        return {"seconds": self.seconds, "num_sessions": self.num_sessions}

    def load(self, tree: Json | None) -> None:
        """Goes on from the `state` of a checkpoint, in the session that has begun; None where it does not say."""
        before = tree or {}
        self.seconds_before = float(before.get("seconds", 0.0))
        self.num_sessions = int(before.get("num_sessions", 0)) + 1


def record_run(
    trainer: Trainer,
    trained: TrainOutput,
    settings: Facts,
    origins: Mapping[str, str],
    arguments: Sequence[str],
    task: Facts,
) -> CommonRecord:
    """Records what does not depend on the task: model size, training metrics, arguments, machine, time and memory.

    Args:
        trainer, trained: after training, and what `train` returned.
        settings: arguments of model and data by name; training arguments come from the trainer, as the plan left them.
        origins: where each argument came from, as `FastArgumentParser` recorded.
        arguments: the command line, for the command that repeats the run.
        task: what the task adds; its `model` is joined with what is known of any.

    Local data and models are absolute paths in the settings, so that nobody takes `data/pairs` for a Hub id.
    """
    model = trainer.model
    parameters = [(p.numel(), p.requires_grad) for p in model.parameters()] if model is not None else []
    best = trainer.args.metric_for_best_model
    hardware = detect_hardware(trainer.args.device)
    return CommonRecord(
        format=FORMAT,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_command(arguments),
        seed=trainer.args.seed,
        trainer=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        model=ModelRecord(
            class_=type(model).__name__,
            num_parameters=sum(n for n, _ in parameters),
            num_trainable=sum(n for n, trains in parameters if trains),
            own=task.get("model", {}),
        ),
        train=trained.metrics,
        best={"step": trainer.state.best_global_step, **({best: trainer.state.best_metric} if best else {})},
        settings={name: _setting(trainer.args, settings, name) for name in sorted(origins)},
        settings_from={name: origin for name, origin in sorted(origins.items()) if origin != "default"},
        environment=Environment(
            device=hardware.device_name or hardware.name,
            num_processes=trainer.args.world_size,
            versions={name: installed_version(name) for name in PACKAGES if installed_version(name)},
        ),
        costs=_costs(trainer, trained.metrics),
        own={name: value for name, value in task.items() if name != "model"},
    )


def _setting(args: TrainingArguments, settings: Facts, name: str) -> Any:
    value = settings[name] if name in settings else getattr(args, name, None)
    if name in SOURCES:
        return [absolute_if_local(item) for item in value] if isinstance(value, list) else absolute_if_local(value)
    return "<set>" if is_secret(name) and value else value


def absolute_if_local(name: object) -> Any:
    """Returns the absolute path of a file or folder of this machine; anything else, a Hub id or None, as it is."""
    path = Path(name).expanduser() if isinstance(name, str) and name else None
    return os.path.abspath(path) if path and path.exists() else name


def _command(arguments: Sequence[str]) -> str:
    """Returns the command line without tokens.

    Those come from `hf auth login` or the environment when it is repeated.
    """
    program = program_words()
    if len(program) > 1 and "LOCAL_RANK" not in os.environ:
        return shlex.join([*program, *without_tokens(arguments)])
    parts = Path(program[0]).parts
    script = ["/".join(parts[parts.index("recipes") :] if "recipes" in parts else parts[-2:])]
    script = ["-m", "hf_ext", *program[1:]] if len(program) > 1 else script
    # --quiet: where the run fails, its message is the last line, and not accelerate's traceback.
    return shlex.join(["accelerate", "launch", "--quiet", *script, *without_tokens(arguments)])


def without_tokens(arguments: Sequence[str]) -> list[str]:
    """Returns command-line words without arguments that may hold a token."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, is_joined, _ = word.partition("=")
        if not (name.startswith("--") and is_secret(name)):
            kept.append(word)
        elif not is_joined:
            next(words, None)
    return kept


def _costs(trainer: Trainer, metrics: Facts) -> Costs:
    """Returns seconds and memory. Of all sessions of the run; what is before and after training of this one only."""
    phases = end_phases()
    this_process = sum(one["wall_s"] for one in phases.values())
    clock = next((c for c in trainer.callback_handler.callbacks if isinstance(c, RunClockCallback)), None)
    if clock is not None and clock.num_sessions:
        train_s = clock.seconds
        wall_s = this_process + max(train_s - metrics["train_runtime"], 0.0)
    else:  # stock Trainer, or heads that trainers of their own trained, some perhaps in an earlier process
        train_s = metrics["train_runtime"]
        wall_s = max(this_process, train_s)
    return Costs(
        wall_s=wall_s,
        train_s=train_s,
        num_sessions=clock.num_sessions or None if clock else 1,
        peak_memory_gib=metrics.get("train_peak_memory_gib"),
        memory_of="process" if trainer.args.device.type == "cpu" else "device",
        phases=phases,
    )
