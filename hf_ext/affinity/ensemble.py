"""`--num_seeds N`: N heads on one embedding cache, each an ordinary run, one model of their mean, and their spread."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Sequence
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
from ..evaluation import score_predictions
from ..evaluation.resampling import ResamplingUnits
from ..models.affinity import AffinityModel
from ..models.process_settings import replaced
from ..reporting import units as shown
from ..reporting.run_record import RunClockCallback, record_evaluations, write_json
from ..training_args import FastTrainingArguments
from .building import HEAD_SETTINGS
from .scoring import SplitScores

FINISHED = "finished.json"
SHARED = ("label_mean", "label_std", "is_scaled", "encoder_dtype", "encoder_autocast", "encoder_bits")  # of the config
MEANING = (
    "The spread between seeds comes from initialisation, dropout and the order of rows alone: what all heads get "
    "wrong together, and noise of the measurement, it does not show."
)
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
    config, cache = trainer.model.config, trainer.plan["embedding_cache"]
    num = config.ensemble_size
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
    folders = {seed: Path(str(trainer.args.output_dir)) / f"seed-{seed}" for seed in range(args.seed, args.seed + num)}
    if args.resume == "no":
        _forget(trainer, folders.values())
    runs: list[dict[str, Any]] = []
    for seed, folder in folders.items():
        logger.info("Head %d of %d, seed %d.", len(runs) + 1, num, seed)
        runs.append(_train_one(trainer, args, seed, folder))
    for member, folder in zip(trainer.model.head.members, folders.values()):
        check_model(folder)  # it may be of an earlier process
        weights = load_file(folder / SAFE_WEIGHTS_NAME)
        prefix = "head."
        member.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    first = folders[args.seed]
    saved = json.loads((first / "config.json").read_text())
    for name in SHARED:
        setattr(config, name, saved.get(name, getattr(type(config), name)))
    trainer.state = TrainerState.load_from_json(str(first / TRAINER_STATE_NAME))
    trainer.collapse_alarms.extend({**alarm, "seed": run["seed"]} for run in runs for alarm in run["alarms"])
    return TrainedSeeds([*folders], runs)


def _forget(trainer: Any, folders: Iterable[Path]) -> None:
    """Nothing of earlier runs may be continued, even if this one is killed before it comes to a seed."""
    if trainer.is_world_process_zero():
        for folder in folders:
            (folder / FINISHED).unlink(missing_ok=True)
            if folder.is_dir():
                CheckpointStore(folder).set_aside_after(-1)
    trainer.accelerator.wait_for_everyone()


def _train_one(trainer: Any, args: FastTrainingArguments, seed: int, folder: Path) -> dict[str, Any]:
    """Trains or reads one head; returns its facts."""
    member = _make_member(trainer, args, seed, folder)
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


def _make_member(trainer: Any, args: FastTrainingArguments, seed: int, folder: Path) -> Any:
    """The trainer of one head: as of a command with `--seed`, in its own folder, with its share of the disk."""
    config, args = trainer.model.config, copy.copy(args)
    args.seed, args.output_dir, args.push_to_hub = seed, str(folder), False
    if args.save_total_size_gb is not None:
        args.save_total_size_gb /= config.ensemble_size + 1  # the last share is for the model of all heads
    set_seed(seed)
    settings = {name: getattr(config, name) for name in HEAD_SETTINGS}
    model = AffinityModel.from_encoders(config.encoder_specs, config.tower_specs, **settings)
    rows = trainer.train_dataset, trainer.eval_dataset
    return type(trainer)(model, args, trainer.data_collator, *rows, compute_metrics=trainer.compute_metrics)


def predict_members(trainer: Any, rows: Any) -> np.ndarray:
    """Predictions of every head of an ensemble for `rows`, label units: (n, heads) float32.

    Cost: one pass, as `trainer.predict`.
    """
    with replaced(trainer, compute_metrics=None):  # they are those of one prediction per row
        return trainer.predict(rows, ignore_keys=[]).predictions[1]


@dataclass(frozen=True)
class SeedScores:
    """`facts` for `all_results.json["seeds"]`; `std`: (n,) standard deviation over heads per test row, label units."""

    facts: dict[str, Any]
    std: np.ndarray

    def text(self) -> str:
        """The facts in a few lines."""
        facts = self.facts
        lines = [f"{facts['num_seeds']} seeds ({', '.join(map(str, facts['seeds']))}), one head each, same test rows:"]
        for metric, single in facts["scores"].items():
            if single["mean"] is not None:
                whole = shown.score({"value": facts["ensemble"][metric]["value"]})
                lines.append(f"  {metric}: {single['mean']:.3f} +- {single['std']:.3f}; of their mean {whole}")
        lines.append(
            f"  spread and error of a row, Spearman: {shown.score(facts['uncertainty']['spearman_of_error'])}."
        )
        return "\n".join([*lines, f"  {MEANING}"])


def score_seeds(
    trainer: Any,
    trained: TrainedSeeds,
    splits: Any,
    test: SplitScores,
    threshold: float | None,
    group_column: str | None,
    units: ResamplingUnits | None = None,
) -> SeedScores:
    """Scores every head on the test split, and tests whether their spread says where predictions are wrong.

    Args:
        trainer, trained: after `train_seeds`.
        splits: with test.
        test: scores of the mean prediction on test, from `score_split`.
        threshold, group_column, units: as given to `score_split`.

    Returns:
        Facts: mean and standard deviation of each score over heads, and `uncertainty`: `mean_std`, the sample standard
        deviation over heads, label units, as mean over rows; and `spearman_of_error`, a score with interval: its rank
        correlation with the absolute error of the mean prediction.

    Cost: a pass over test; 1,000 bootstrap resamples of one correlation.
    """
    members = predict_members(trainer, splits["test"]).astype(np.float64)
    groups = splits["test"][group_column][:] if group_column else None
    given: dict[str, Any] = {"groups": groups, "threshold": threshold, "num_resamples": 0}
    singles = [score_predictions(one, test.labels, **given) for one in members.T]
    spread, errors = members.std(axis=1, ddof=1), np.abs(members.mean(1) - test.labels)
    of_error = score_predictions(spread, errors, threshold=None, seed=trainer.args.seed, units=units)["spearman"]
    facts = {
        "num_seeds": len(trained.seeds),
        "seeds": trained.seeds,
        "runs": trained.runs,
        "scores": {
            metric: _over_seeds([single[metric]["value"] for single in singles]) for metric in test.scores["model"]
        },
        "ensemble": test.scores["model"],
        "uncertainty": {"mean_std": float(spread.mean()), "spearman_of_error": of_error},
        "meaning": MEANING,
    }
    return SeedScores(facts, spread)


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation; None where a seed's value is undefined."""
    if any(value is None for value in values):
        return {"mean": None, "std": None, "values": list(values)}
    known = np.asarray(values, np.float64)
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)), "values": known.tolist()}
