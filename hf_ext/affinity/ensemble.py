"""`--num_seeds N`: N heads on one embedding cache, each an ordinary run, and one model that predicts their mean."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from transformers import TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from ..checkpoints.compare import compare_runs, describe_run, refuse
from ..checkpoints.finished_model import check_model
from ..checkpoints.store import CheckpointStore
from ..errors import ArgumentError
from ..models.affinity import AffinityModel
from ..models.process_settings import replaced
from ..reporting.run_clock import RunClockCallback
from ..reporting.run_record import record_evaluations, write_json
from ..training_args import FastTrainingArguments
from .building import HEAD_SETTINGS

FINISHED = "finished.json"
logger = logging.getLogger(__name__)


@dataclass
class TrainedSeeds:
    """What `train_seeds` returns. `runs`: per seed its number, folder, training metrics and evaluations; JSON-able."""

    seeds: list[int]
    runs: list[dict[str, Any]]

    @property
    def metrics(self) -> dict[str, Any]:
        """Training metrics of the first seed; runtime, of all sessions, summed and loss averaged over all seeds."""
        every = [run["metrics"] for run in self.runs]
        losses = [metrics["train_loss"] for metrics in every]
        loss = None if None in losses else sum(losses) / len(losses)
        return {**every[0], "train_runtime": sum(run["train_s"] for run in self.runs), "train_loss": loss}


def train_seeds(trainer: Any, args: FastTrainingArguments) -> TrainedSeeds:
    """Trains one head per seed, one after the other, and gives them to `trainer.model`.

    Seeds are `args.seed` and those that follow it. Each head is the run that `--seed` would be on the same splits, bit
    by bit: its own initialisation, order of rows, checkpoints and model in `output_dir/seed-<k>`. With `resume="auto"`
    a seed that has finished is read from there and one that was interrupted continues.

    Args:
        trainer: a `FastTrainer` of an `AffinityModel` with `ensemble_size` above 1, with the data to train on. Its
            model has trained heads afterwards; its state, with the log, is the first seed's; alarms are all seeds'.
        args: the arguments that `trainer` was made from, not those that its plan has changed.

    Raises:
        ArgumentError: no embedding cache, or a single checkpoint to resume from.
        CheckpointError: a seed's folder belongs to a run that differs.
        TrainingStopped: as `FastTrainer.train`; the same command continues.

    Cost: N times the training of one head. Encoders run once, and their embeddings are kept in memory once.
    """
    _check(trainer, args)
    seeds = [args.seed + i for i in range(trainer.model.config.ensemble_size)]
    if args.resume == "no":
        _forget(trainer, seeds)
    runs = []
    for i, seed in enumerate(seeds):
        logger.info("Head %d of %d, seed %d.", i + 1, len(seeds), seed)
        runs.append(_train_one(trainer, args, seed))
    _gather(trainer, [Path(run["folder"]) for run in runs])
    trainer.collapse_alarms.extend({**alarm, "seed": run["seed"]} for run in runs for alarm in run["alarms"])
    return TrainedSeeds(seeds, runs)


def _check(trainer: Any, args: FastTrainingArguments) -> None:
    num = trainer.model.config.ensemble_size
    cache = trainer.plan["embedding_cache"]
    if cache.status != "applied":
        raise ArgumentError(
            f"--num_seeds {num} trains heads on the embedding cache, which is {cache.status} ({cache.reason}). Use "
            f"--preset max_speed, or run {num} commands, each with another --seed and --output_dir."
        )
    if args.resume not in ("auto", "no") or args.resume_from_checkpoint:
        raise ArgumentError(
            f"--resume {args.resume_from_checkpoint or args.resume}: with --num_seeds {num} each seed has checkpoints "
            "of its own. Use --resume auto or no."
        )


def _forget(trainer: Any, seeds: list[int]) -> None:
    """Nothing of earlier runs may be continued, even if this one is killed before it comes to a seed."""
    if trainer.is_world_process_zero():
        for folder in (_folder(trainer, seed) for seed in seeds):
            (folder / FINISHED).unlink(missing_ok=True)
            if folder.is_dir():
                CheckpointStore(folder).set_aside_after(-1)
    trainer.accelerator.wait_for_everyone()


def _folder(trainer: Any, seed: int) -> Path:
    return Path(trainer.args.output_dir) / f"seed-{seed}"


def _train_one(trainer: Any, args: FastTrainingArguments, seed: int) -> dict[str, Any]:
    """Trains or reads one head; returns its facts."""
    folder = _folder(trainer, seed)
    member = _make_member(trainer, _member_args(args, seed, folder, trainer.model.config.ensemble_size))
    try:
        facts = describe_run(member)
        finished = folder / FINISHED
        if finished.is_file():
            record = json.loads(finished.read_text())
            refuse(folder, compare_runs(record["facts"], facts, args.allow_changed).contradictions)
            logger.info("Seed %d has finished: read from %s.", seed, folder)
            return {**record["run"], "folder": str(folder)}  # it may have been moved
        output = member.train()
        member.save_model()
        member.save_state()
        run = {
            "seed": seed,
            "folder": str(folder),
            "metrics": output.metrics,
            "train_s": next(c.seconds for c in member.callback_handler.callbacks if isinstance(c, RunClockCallback)),
            "best": {"step": member.state.best_global_step, "value": member.state.best_metric},
            **record_evaluations(member),
        }
        if member.is_world_process_zero():
            write_json(finished, {"facts": facts, "run": run})
        member.accelerator.wait_for_everyone()
        return run
    finally:
        member.close()


def _member_args(args: FastTrainingArguments, seed: int, folder: Path, num: int) -> FastTrainingArguments:
    """As the command with `--seed`, but in a folder of its own, with its share of the disk, and never pushed."""
    args = copy.copy(args)
    args.seed, args.output_dir, args.push_to_hub = seed, str(folder), False
    if args.save_total_size_gb is not None:
        args.save_total_size_gb /= num + 1  # the last share is for the model of all heads
    return args


def _make_member(trainer: Any, args: FastTrainingArguments) -> Any:
    config = trainer.model.config
    set_seed(args.seed)
    model = AffinityModel.from_encoders(
        config.encoder_specs, config.tower_specs, **{name: getattr(config, name) for name in HEAD_SETTINGS}
    )
    return type(trainer)(
        model,
        args,
        trainer.data_collator,
        trainer.train_dataset,
        trainer.eval_dataset,
        compute_metrics=trainer.compute_metrics,
    )


def _gather(trainer: Any, folders: list[Path]) -> None:
    """Puts the saved heads, and the scales they share, into `trainer.model`; the first seed's log into the state."""
    model = trainer.model
    for member, folder in zip(model.head.members, folders):
        check_model(folder)  # it may be of an earlier process
        weights = load_file(folder / SAFE_WEIGHTS_NAME)
        prefix = "head."
        head = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        member.load_state_dict(head)
    saved = json.loads((folders[0] / "config.json").read_text())
    for name in ("label_mean", "label_std", "is_scaled", "encoder_dtype", "encoder_autocast", "encoder_bits"):
        setattr(model.config, name, saved.get(name, getattr(type(model.config), name)))
    trainer.state = TrainerState.load_from_json(str(folders[0] / TRAINER_STATE_NAME))


def predict_members(trainer: Any, rows: Any) -> np.ndarray:
    """Predictions of every head of an ensemble for `rows`, label units: (n, heads) float32.

    Cost: one pass, as `trainer.predict`.
    """
    with replaced(trainer, compute_metrics=None):  # they are those of one prediction per row
        return trainer.predict(rows, ignore_keys=[]).predictions[1]
