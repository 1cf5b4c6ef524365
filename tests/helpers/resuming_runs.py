"""Small runs of every kind that are interrupted, resumed and compared with the run that nobody interrupted."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from inside import MaskedLMArguments, build_masked_lm, build_masked_lm_collator, build_tokenizer, compute_metrics
from run_outcomes import Killed
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_ext.data import STANDARD, DataArguments, MaskedLMCollator, SequenceCollator, mark_evaluation
from hf_ext.masked_lm import results
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_ROWS = 14
BATCH = 2  # 7 batches an epoch: accumulated over 2 or 5, the last step of an epoch has one or two of them
NUM_PASSES = 3
STREAMS = ("stream", "shuffled stream")
SHAPE = MaskedLMArguments(model_size="demo")  # states of matrices fit 8 bits
COMPARED = (
    "loss",
    "total_flos",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
)  # the others are rates, evaluation results, and `train_loss`, the mean over one session
IDS = "row_ids"


class Kill(TrainerCallback):
    """Raises after `step` optimizer steps and, where there are several, one batch of the next."""

    def __init__(self, step: int, accumulation: int):
        self.step, self.accumulation = step, accumulation

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.accumulation == 1 and state.global_step == self.step:
            raise Killed

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:  # the last step of an epoch: the next one begins
            raise Killed


class SeenRows(FastTrainer):
    """Notes the rows of each optimizer step as they are trained on."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seen: dict[int, list[int]] = defaultdict(list)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = inputs.pop(IDS, None)  # rows of cached embeddings have none; their labels are their numbers
        self.seen[self.state.global_step] += (inputs["labels"] if ids is None else ids).int().tolist()
        return super().training_step(model, inputs, *args, **kwargs)


class NumberedMaskedLM(MaskedLMCollator):
    """With the numbers of the rows."""

    def __call__(self, features: Any) -> dict[str, Any]:
        return number(super().__call__(features), features)


class NumberedSequences(SequenceCollator):
    """With the numbers of the rows."""

    def __call__(self, features: Any) -> dict[str, Any]:
        return number(super().__call__(features), features)


def number(batch: dict[str, Any], features: Any) -> dict[str, Any]:
    """Adds the numbers where there are any: in rows of text for training."""
    rows = [] if isinstance(features, dict) else features
    ids = [row["row"] for row in rows if row.get("mask_epoch") != -1 and "row" in row]
    return {**batch, IDS: torch.tensor(ids)} if ids else batch


@dataclass(frozen=True)
class Case:
    """A kind of run, where it is saved last, and where it is killed."""

    data: str
    task: str = "masked"
    num_workers: int = 0
    accumulation: int = 1
    save_step: int = 0  # 0: in the second pass
    given: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def steps_per_pass(self) -> int:
        return -(-NUM_ROWS // BATCH // self.accumulation)

    @property
    def step(self) -> int:
        return self.save_step or self.steps_per_pass + 1

    @property
    def kind(self) -> tuple:
        """Cases of one kind have one uninterrupted run; workers change nothing."""
        return self.data, self.task, self.accumulation, self.step, self.given

    def __str__(self) -> str:
        extra = "".join(f" {name}={value}" for name, value in self.given)
        return f"{self.data}, {self.task}, workers {self.num_workers}, x{self.accumulation}, step {self.step}{extra}"


def make_sequences() -> datasets.Dataset:
    """Rows of 8 to 25 residues with a number; the longest come in no order."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 26, NUM_ROWS)
    rows = ["".join(rng.choice(list(STANDARD), n)) for n in lengths]
    return datasets.Dataset.from_dict({"sequence": rows, "row": list(range(NUM_ROWS))})


class Runs:
    """Builds and trains cases; uninterrupted runs are kept."""

    def __init__(self, folder: Path, make_affinity: Any, demo_rows: datasets.Dataset):
        self.folder, self.make_affinity = folder, make_affinity
        table = demo_rows.select(range(NUM_ROWS)).remove_columns("label")
        self.table = table.add_column("label", [float(i) for i in range(NUM_ROWS)]).add_column("row", range(NUM_ROWS))
        self.held_out = demo_rows.select(range(NUM_ROWS, NUM_ROWS + 6))
        self.sequences = make_sequences()
        self.num_runs = 0
        self._whole: dict[tuple, SeenRows] = {}

    def whole(self, case: Case) -> SeenRows:
        """The uninterrupted run, without workers."""
        if case.kind not in self._whole:
            trainer = self.make(Case(case.data, case.task, 0, case.accumulation, case.save_step, case.given))
            trainer.train()
            trainer.close()
            self._whole[case.kind] = trainer
        return self._whole[case.kind]

    def interrupt(self, case: Case) -> SeenRows:
        """A run that was killed in the step after the one after its checkpoint."""
        trainer = self.make(case, [Kill(case.step + 1, case.accumulation)])
        try:
            trainer.train()
        except Killed:
            trainer.close()
            return trainer
        raise AssertionError("the run was not killed")

    def resume(self, case: Case, interrupted: SeenRows, *callbacks: TrainerCallback, **given: Any) -> SeenRows:
        """The same run again, from the checkpoint of the one that was killed."""
        folder = interrupted.args.output_dir
        trainer = self.make(case, list(callbacks), output_dir=folder, **given)
        trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{case.step}"))
        trainer.close()
        return trainer

    def make(self, case: Case, callbacks: list | None = None, **given: Any) -> SeenRows:
        """A new trainer in a folder of its own."""
        self.num_runs += 1
        model, collator, rows, held_out, settings = self._masked(case) if case.task == "masked" else self._table(case)
        settings = {
            "output_dir": str(self.folder / str(self.num_runs)),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 3,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": case.accumulation,
            "dataloader_num_workers": case.num_workers,
            "num_train_epochs": NUM_PASSES,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": case.step,
            **settings,
            **dict(case.given),
            **given,
        }
        patience = settings.pop("patience", None)
        stopping = [] if patience is None else [EarlyStoppingCallback(patience)]
        args = FastTrainingArguments(**settings)
        metrics = results.compute_metrics if case.task == "masked" else compute_metrics
        return SeenRows(
            model,
            args,
            collator,
            rows,
            held_out if args.eval_strategy != "no" else None,
            compute_metrics=metrics,
            preprocess_logits_for_metrics=results.sum_rows if case.task == "masked" else None,
            callbacks=[*stopping, *(callbacks or [])],
        )

    def _masked(self, case: Case) -> tuple:
        torch.manual_seed(0)
        model = build_masked_lm(SHAPE)
        collator = build_masked_lm_collator(build_tokenizer(SHAPE), model, SHAPE, DataArguments(), 0)
        collator.__class__ = NumberedMaskedLM
        settings: dict[str, Any] = {}
        rows: Any = self.sequences
        if case.data in STREAMS:
            rows = rows.to_iterable_dataset(num_shards=2)
            settings["max_steps"] = 3 * case.steps_per_pass
        if case.data == "shuffled stream":
            rows = rows.shuffle(seed=0, buffer_size=5)
        if case.data == "packed":
            settings["speedups"] = ["attention", "packing"]
        if case.data == "token budget":
            settings["max_tokens_per_batch"] = 60
        if case.data == "grouped":
            settings["train_sampling_strategy"] = "group_by_length"
        return model, collator, rows, mark_evaluation(self.sequences), settings

    def _table(self, case: Case) -> tuple:
        towers = ("frozen", "lora") if case.task == "lora" else ("frozen", "frozen")
        model, collator = self.make_affinity(*towers, head_dropout=0.2)
        collator.__class__ = NumberedSequences
        settings: dict[str, Any] = {}
        if case.data == "cached":
            settings = {"speedups": ["embedding_cache"], "embedding_cache_dir": str(self.folder / "cache")}
        if case.data == "grouped":
            settings["train_sampling_strategy"] = "group_by_length"
        rows = self.table.to_iterable_dataset(num_shards=2) if case.data == "stream" else self.table
        if case.data == "stream":
            settings["max_steps"] = 3 * case.steps_per_pass
        return model, collator, rows, self.held_out, settings


def differences(ours: SeenRows, whole: SeenRows) -> list[str]:
    """What is not bit-identical: weights, logged values and evaluation results, early stopping's state."""
    found = []
    left, right = ours.model.state_dict(), whole.model.state_dict()
    if left.keys() != right.keys() or not all(torch.equal(left[name], right[name]) for name in right):
        found.append("weights")
    if history(ours) != history(whole):
        pairs = zip(history(ours), history(whole))
        found.append(f"log: {next((pair for pair in pairs if pair[0] != pair[1]), 'length')}")
    if ours.state.global_step != whole.state.global_step or ours.state.best_metric != whole.state.best_metric:
        found.append("where it stopped")
    return found


def history(trainer: SeenRows) -> list[dict[str, float]]:
    """The log without times and rates."""
    entries = trainer.state.log_history
    return [{name: value for name, value in entry.items() if is_result(name)} for entry in entries]


def is_result(name: str) -> bool:
    return name in COMPARED or (name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")))
