"""What each of two processes runs: `python on_ranks.py FOLDER [CHECK ...]`, alone or under torchrun.

All checks, or those named, one after the other in one launch; what each found is in `FOLDER/RANK.json` under its name.
`FOLDER/encoders` holds what `equal_cases.write_encoders` wrote.
"""

import gc
import json
import math
import os
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from equal_cases import make_parts
from faulty_runs import Maker
from faulty_runs import make_rows as make_faulty_rows
from miniature_esm import make_narrow_esm, make_wide_esm
from small_evaluations import count, evaluations, make_rows, make_trainer
from small_memory import Room
from stock_twins import run_both
from tiny_masked_lm import make_args as make_masked_args
from tiny_masked_lm import make_rows as make_masked_rows
from token_rows import pad_rows
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments
from watched_runs import make_script, model_of
from watched_runs import make_trainer as make_watched_trainer

import hf_ext.trainer
from hf_ext.embeddings.encode import SMALLEST_SHARD
from hf_ext.errors import ArgumentError, DataError, HfExtError, PlanRefused
from hf_ext.hub import HubError, push
from hf_ext.models import recompute
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))
BATCHES, TASKS = (1, 4, 37), ("regression", "masked")
UNMOVED = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0}  # processes stay alike
CHECKS: dict[str, Callable[[Path], Any]] = {}


def check(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """One of the launch; it gets a folder of its own, shared by the processes, and returns what JSON takes."""
    CHECKS[function.__name__] = function
    return function


def said(error: type[HfExtError], act: Callable[[], Any]) -> str:
    """The message with which an action is refused; "" where it is not."""
    try:
        act()
    except error as refusal:
        return str(refusal)
    return ""


def make_evals(task: str, streams: bool, num_rows: int = 37) -> Any:
    """Rows, or a stream of one shard, which two processes cannot share."""
    rows = make_rows(num_rows, task)
    return rows.to_iterable_dataset(1) if streams else rows


@check
def evaluates(folder: Path) -> dict[str, Any]:
    """Metrics of all rows and of a subset, by batch size, of rows and of streams, and those of stock Trainer."""

    def whole(task: str, batch: int, streams: bool = False, **given: Any) -> dict[str, float]:
        given = {"compute_metrics": count, "per_device_eval_batch_size": batch, **given}
        return make_trainer(folder, make_evals(task, streams), task, **given).evaluate()

    def on_subset(task: str, streams: bool) -> list[dict[str, float]]:
        given = {**UNMOVED, "compute_metrics": count, "eval_subset": 5}
        trainer = make_trainer(folder, make_evals(task, streams), task, **given)
        trainer.train()
        return evaluations(trainer)

    stock = {"trainer_cls": Trainer, "args_cls": TrainingArguments}
    return {
        "whole": {task: [whole(task, batch) for batch in BATCHES] for task in TASKS},
        "stream": {task: [whole(task, batch, True) for batch in (4, 37)] for task in TASKS},
        "stock": {task: whole(task, 4, **stock) for task in TASKS},
        "subset": {task: [on_subset(task, streams) for streams in (False, True)] for task in TASKS},
    }


@check
def predicts_a_stream(folder: Path) -> dict[str, list[float]]:
    """Labels that `predict` gives back, in its order."""
    trainer = make_trainer(folder, None, eval_strategy="no", per_device_eval_batch_size=4)
    return {str(n): trainer.predict(make_evals("regression", True, n)).label_ids.tolist() for n in (1, 16, 37)}


@check
def refuses_streams_that_differ_and_dispatch(folder: Path) -> list[str]:
    rows = make_rows(37).select(range(RANK, 37, 2)).to_iterable_dataset(1)
    dispatch = {"accelerator_config": {"dispatch_batches": True}}
    return [
        said(DataError, make_trainer(folder, rows).evaluate),
        said(ArgumentError, make_trainer(folder, make_rows(4), **dispatch).train),
    ]


def weigh(base: type) -> type:
    """A subclass whose loss counts no items: three classes of unequal weight."""

    class Weighted(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 9.0, 2.0])
            loss = cross_entropy(outputs["logits"].reshape(-1, 3), labels.reshape(-1), weight=weight)
            return (loss, outputs) if return_outputs else loss

    return Weighted


@check
def takes_a_loss_of_the_users(folder: Path) -> dict[str, list[str]]:
    """What is not as in stock Trainer where a subclass computes the loss; and where the override is not seen."""
    find, places = hf_ext.training.host.find_override, [*sys.modules.values()]
    asking = [module for module in places if getattr(module, "find_override", None) is find]
    found = {}
    for name, finder in (("seen", find), ("unseen", lambda trainer, *names: None)):
        for module in asking:
            module.find_override = finder
        given = {"num_rows": 23, "gradient_accumulation_steps": 2, "max_steps": 5}
        ours, stock = run_both(folder / name, "EsmForTokenClassification", weigh, **given)
        found[name] = ours.differences(stock)
    for module in asking:
        module.find_override = find
    return found


@check
def stops_early(folder: Path) -> list[Any]:
    """A run that stops after the third step; its evaluation batches are no whole number for two processes."""
    script = make_script(model_of(0.3), *(model_of(1.0, i) for i in range(6)))
    trainer = make_watched_trainer(folder, script, early_stopping_patience=2, per_device_eval_batch_size=64)
    trainer.train()
    return [trainer.state.global_step, trainer.stopping_decisions]


class LabelOnPadding:
    """A label where the mask is 0, in the second batch of the second process."""

    def __init__(self) -> None:
        self.left = 2 if RANK else -1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_rows(rows)
        self.left -= len(rows) == 2  # no probe
        if self.left == 0:
            batch["attention_mask"][0, 1], batch["labels"][0, 1] = 0, 7
        return batch


@check
def sees_a_loss_that_reads_padding(folder: Path) -> str:
    given = {"speedups": ["packing"], "attention": "blocked", "per_device_train_batch_size": 2}
    args = make_masked_args(folder, **given)
    return said(PlanRefused, FastTrainer(make_wide_esm(), args, LabelOnPadding(), make_masked_rows(24)).train)


@check
def runs_out_of_memory(folder: Path) -> dict[str, Any]:
    """The second process is, where a case says so: how far weights are from those of a run that is not, and its parts.

    Gradients are sent in the last of two passes of a step: call 2, and 5 behind the one row that sends them.
    """

    def run(name: str, room: Room | None, **given: Any) -> FastTrainer:
        model = make_wide_esm(torch_dtype=torch.float64).double()
        (room if RANK and room else Room()).watch(model.esm.encoder.layer[1])
        model.register_buffer("sent_every_step", torch.zeros(3))
        given = {"gradient_accumulation_steps": 2, "max_steps": 4, "disable_tqdm": True, **given}
        trainer = FastTrainer(model, make_masked_args(folder / name, **given), pad_rows, make_masked_rows(28))
        trainer.train()
        return trainer

    def weights(trainer: FastTrainer) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    whole = weights(run("whole", None))
    found = {}
    for where in ("forward", "backward"):
        rooms = {"all": Room(2, where), "first": Room(None, where, (1,)), "sent": Room(None, where, (2,))}
        for name, room in {**rooms, "later": Room(None, where, (5,)), "one": Room(1, where)}.items():
            trainer = run(f"{where}-{name}", room)
            parts = [entry["batch_parts"] for entry in trainer.state.log_history if "batch_parts" in entry]
            found[f"{where} {name}"] = [float((weights(trainer) - whole).abs().max()), parts]
    saving = {"save_strategy": "steps", "save_steps": 2}
    halved = run("halved", Room(None, "backward", (2,)), **saving)
    again = run("halved", None, resume=str(folder / "halved" / "checkpoint-2"), **saving)
    found["continued"] = [torch.equal(weights(again), weights(halved)), torch.equal(weights(again), whole)]
    rows = run("find", Room(3), find_batch_size=True, gradient_accumulation_steps=3)
    return {**found, "rows": [rows.args.per_device_train_batch_size, rows.args.gradient_accumulation_steps]}


@check
def leaves_steps_out(folder: Path) -> list[Any]:
    """Which, of a run with a label that one process sees; whether they changed weights; and whether a killed run ends
    as it does."""
    make = Maker(make_narrow_esm())
    given = {"rows": make_faulty_rows(row7=math.nan), "num_train_epochs": 4, "nan_policy": "skip"}

    def outcome(name: str, **more: Any) -> tuple[list[int], dict[int, Any]]:
        trainer = make(folder / name, **given, **more)
        trainer.train()
        left = [entry["skipped_step"] for entry in trainer.state.log_history if "skipped_step" in entry]
        return left, make.watch.weights

    left, weights = outcome("whole")
    make.killed(folder / "killed", at=left[1] + 2, **given)
    resumed = outcome("killed", resume="auto")
    kept = [weights[step] == weights[step - 1] for step in range(1, 13)]
    return [left, [step + 1 for step in range(12) if kept[step]], resumed[0], resumed[1][12] == weights[12]]


@check
def pushes(folder: Path) -> dict[str, str]:
    """What each process heard of a push to "me/good", and of one to "me/broken", whose Hub refuses commits."""
    push.WAITS_S = ()
    report = {}
    for name in ("good", "broken"):
        given = {"push_to_hub": True, "hub_model_id": f"me/{name}", "hub_strategy": "every_save", "max_steps": 2}
        given |= {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
        trainer = make_trainer(folder / name, None, eval_strategy="no", **given)
        trainer.train()
        try:
            report[name] = trainer.push_to_hub().oid
        except HubError as error:
            report[name] = str(error)
        trainer.args.push_to_hub = False  # else `end` raises again
    return report


def make_few_antigens(encoders: Path) -> tuple:
    """A head on cached embeddings, and rows with three antigens in all: one process has none of them to encode."""
    model, collator, rows = make_parts("frozen_cache", encoders)
    antigens = [rows["antigen"][i % 3] for i in range(len(rows))]
    return model, collator, rows.remove_columns("antigen").add_column("antigen", antigens)


class Counting(FastTrainer):
    """Counts what this process encodes, and may kill it in its second shard."""

    dies = False

    def encode_sequences(self, name: str, sequences: list[str]) -> torch.Tensor:
        counts = self.__dict__.setdefault("counts", {}).setdefault(name, Counter())
        counts.update(sequences)
        if self.dies and counts.total() > SMALLEST_SHARD:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_sequences(name, sequences)


@check
def fills_the_cache(folder: Path, dies: bool = False) -> dict[str, Any]:
    """How often each sequence was encoded, by input."""
    model, collator, rows = make_few_antigens(folder.parent / "encoders")
    given = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    given |= {"speedups": ["embedding_cache"], "embedding_cache_dir": str(folder.parent / "cache")}
    trainer = Counting(model, FastTrainingArguments(str(folder), **given), collator, rows)
    trainer.dies = dies and RANK == 1
    trainer.train()
    num_encoded = trainer.plan["embedding_cache"].evidence["num_encoded"]
    return {"counts": trainer.__dict__.get("counts", {}), "num_encoded": num_encoded}


@check
def finds_the_cache_full(folder: Path) -> dict[str, Any]:
    return fills_the_cache(folder)


def dies_filling_the_cache(folder: Path) -> None:
    fills_the_cache(folder, dies=True)


@check
def recomputes(folder: Path) -> dict[str, float]:
    """How far a run with dropout ends from one that keeps all activations; "anew": of dropout that is drawn again."""
    weights = {}
    for asked in (None, "attention", "feed_forward", "layers", 2, "anew"):
        given = {"activation_checkpointing": None if asked == "anew" else asked, "max_steps": 2}
        args = make_masked_args(folder / str(asked), **given)
        trainer = FastTrainer(make_wide_esm(hidden_dropout_prob=0.1), args, pad_rows, make_masked_rows())
        kept = asked != "anew"
        if not kept:
            recompute(trainer.model, "layers")
        with patch("hf_ext.models.blocks.checkpoint", partial(checkpoint, preserve_rng_state=kept)):
            trainer.train()
        weights[str(asked)] = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return {asked: float((found - weights["None"]).abs().max()) for asked, found in weights.items()}


@check
def scales_the_rate(folder: Path) -> list[Any]:
    """The plan's words, and the rates of the optimizer's groups in the first step."""
    given = {"lr_scaling": "linear", "lr_base_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    args = make_masked_args(folder, learning_rate=1e-3, lr_scheduler_type="constant", **given)
    trainer = FastTrainer(make_wide_esm(), args, pad_rows, make_masked_rows())
    trainer.train()
    return [trainer.plan["lr_scaling"].reason, [group["lr"] for group in trainer.optimizer.param_groups]]


def count_gloo_threads() -> int:
    """Threads of this process that work for gloo, by the name that torch gives them."""
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


@check
def leaves_nothing(folder: Path) -> dict[str, Any]:
    """The last: what the launch became without `use_cpu`, and what is left of it after `end`."""

    def make(name: str) -> FastTrainer:
        return make_trainer(folder / name, None, eval_strategy="no", max_steps=2, use_cpu=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", "2")
        refused = said(PlanRefused, lambda: make("fsdp"))
    first, trainer = make("first"), make("run")
    first.train()  # stays alive, and so would its DDP model
    trainer.train()
    wrapped = [weakref.ref(one.model_wrapped) for one in (first, trainer)]
    report = {
        "refused": refused,
        "world": trainer.args.world_size,
        "use_cpu": [trainer.args.use_cpu, "use_cpu" in trainer.args.explicit_fields],
        "wrapped": [isinstance(one(), DistributedDataParallel) for one in wrapped],
        "threads": [count_gloo_threads()],
    }
    trainer.end()
    report["left"] = [one() is not None for one in wrapped] + [distributed.is_initialized()]
    report["threads"].append(count_gloo_threads())
    return report


def main(folder: Path, *names: str) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    report = {}
    for name in names or CHECKS:
        found = globals()[name](folder / name)
        report[name] = found
    (folder / f"{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
