"""The top of a report: what it is about, the verdict, the alarms, the numbers to remember."""

from __future__ import annotations

from typing import Any

from .. import units
from ..units import is_finite
from .blocks import KeyNumber
from .run_files import RunFiles
from .tasks import TaskReport
from .values import as_dict


def make_subtitle(run: RunFiles) -> str:
    """Model class, when, and the folder's name."""
    created = str(run.results.get("created") or "").replace("T", " ")[:16]
    facts = [
        "Run report",
        str(as_dict(run.results.get("model")).get("class") or ""),
        f"{created} UTC" if created else "",
        run.folder.resolve().name,
    ]
    return " - ".join(fact for fact in facts if fact)


def read_verdict(run: RunFiles) -> tuple[str, bool | None]:
    """The sentence that everything begins with, and whether the model is better; says so where a run has none."""
    verdict = as_dict(run.results.get("verdict"))
    if verdict.get("text"):
        return str(verdict["text"]), verdict.get("is_better")
    return "No verdict: this run was not compared with any baseline.", None


def collect_alarms(task: TaskReport) -> list[str]:
    """What is wrong, in the order of weight: of the task, predictions, training, data, labels; each sentence once."""
    results = task.run.results
    test = as_dict(results.get("test"))
    alarms = task.alarms()
    alarms += [f"Test predictions: {text}" for text in as_dict(test.get("collapse")).get("alarms") or []]
    while_training: dict[str, list[Any]] = {}
    for entry in results.get("alarms") or []:
        name = f" on {entry['name']}" if entry.get("name") else ""
        for text in entry.get("alarms") or []:
            while_training.setdefault(f"{name}: {text}", []).append(entry.get("step"))
    # The numbers in the sentences change with every evaluation, so only the first and the last are worth a line.
    listed = [(steps[0], f"Training, step {units.number(steps[0])}{text}") for text, steps in while_training.items()]
    alarms += [text for _, text in (listed if len(listed) <= 2 else [listed[0], listed[-1]])]
    if len(listed) > 2:
        alarms.append(f"Training: {len(listed) - 2} more alarms between these two, listed under Training.")
    alarms += [f"Data: {text}" for text in as_dict(results.get("data")).get("warnings") or []]
    for split, audit in as_dict(results.get("labels")).items():
        alarms += [f"Labels of {split}: {text}" for text in as_dict(audit).get("alarms") or []]
    return list(dict.fromkeys(alarms))


def key_numbers(task: TaskReport) -> list[KeyNumber]:
    """Score against the best baseline, rows, time, speed, memory, money."""
    run = task.run
    train, costs = as_dict(run.results.get("train")), as_dict(run.results.get("costs"))
    unit = next((name for name in ("residues", "tokens", "sequences") if f"train_{name}_per_s" in train), None)
    speed = f"at {units.rate(train[f'train_{unit}_per_s'], task.unit_word(unit))}" if unit else ""
    price = costs.get("dollars_per_hour")
    memory = {"device": "of the device", "process": "of the process"}.get(str(costs.get("memory_of")), "")
    numbers = [
        *task.score_numbers(),
        KeyNumber("training rows", units.number(_num_rows(run)), _epochs(run)),
        KeyNumber("training time", units.seconds(costs.get("train_s", train.get("train_runtime"))), speed),
        KeyNumber("peak memory", units.gib(costs.get("peak_memory_gib", train.get("train_peak_memory_gib"))), memory),
    ]
    if price is not None:
        numbers.append(KeyNumber("cost", units.dollars(costs.get("dollars")), f"at {units.dollars(price)} per hour"))
    return numbers


def _num_rows(run: RunFiles) -> Any:
    data, planned = as_dict(run.results.get("data")), as_dict(as_dict(run.plan.get("facts")).get("data"))
    return as_dict(data.get("sizes")).get("train", planned.get("num_rows"))


def _epochs(run: RunFiles) -> str:
    epochs = as_dict(run.results.get("train")).get("epoch")
    if not is_finite(epochs) or as_dict(run.results.get("data")).get("streaming"):  # a stream counts steps as epochs
        return ""
    return "seen once" if epochs == 1 else f"seen {epochs:.3g} times"
