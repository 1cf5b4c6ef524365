"""The top of a report: what it is about, the verdict, the alarms, the numbers to remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import units
from ...units import is_finite, less_is_better, metric_name
from .blocks import KeyNumber
from .generation import failed_gates, generation_numbers, generation_title
from .run_files import RunFiles
from .values import as_dict


def make_title(run: RunFiles) -> str:
    """What is predicted from what."""
    columns = list_columns(run)
    if run.is_masked_lm:
        return "Masked language model" + (f" of {join_words(columns)}" if columns else "")
    if run.is_generator:
        return generation_title(run)
    label = label_name(run)
    return f"Predicting {label}" + (f" from {join_words(columns)}" if columns else "")


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


def collect_alarms(run: RunFiles) -> list[str]:
    """What is wrong, in the order of weight: predictions, training, data, labels; each sentence once."""
    results = run.results
    test = as_dict(results.get("test"))
    alarms = failed_gates(run) if run.is_generator else []
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


def key_numbers(run: RunFiles) -> list[KeyNumber]:
    """Score against the best baseline, rows, time, speed, memory, money."""
    train, costs = as_dict(run.results.get("train")), as_dict(run.results.get("costs"))
    unit = next((name for name in ("residues", "tokens", "sequences") if f"train_{name}_per_s" in train), None)
    speed = f"at {units.rate(train[f'train_{unit}_per_s'], unit)}" if unit else ""
    price = costs.get("dollars_per_hour")
    memory = {"device": "of the device", "process": "of the process"}.get(str(costs.get("memory_of")), "")
    numbers = [
        *_scores_of(run),
        KeyNumber("training rows", units.number(_num_rows(run)), _epochs(run)),
        KeyNumber("training time", units.seconds(costs.get("train_s", train.get("train_runtime"))), speed),
        KeyNumber("peak memory", units.gib(costs.get("peak_memory_gib", train.get("train_peak_memory_gib"))), memory),
    ]
    if price is not None:
        numbers.append(KeyNumber("cost", units.dollars(costs.get("dollars")), f"at {units.dollars(price)} per hour"))
    return numbers


def _scores_of(run: RunFiles) -> list[KeyNumber]:
    if run.is_generator:
        return generation_numbers(run)
    return _token_numbers(run) if run.is_masked_lm else _score_numbers(run)


def best_baseline(test: Mapping[str, Any], metric: str) -> tuple[str, dict[str, Any]] | None:
    """Name and score of the baseline with the best value; None where no baseline has one. A teacher is none."""
    scores = as_dict(test.get("scores"))
    entries = {name: as_dict(as_dict(scores.get(name)).get(metric)) for name in as_dict(test.get("baselines"))}
    known = {name: entry for name, entry in entries.items() if is_finite(entry.get("value"))}
    if not known:
        return None
    choose = min if less_is_better(metric) else max
    name = choose(known, key=lambda key: known[key]["value"])
    return name, known[name]


def list_columns(run: RunFiles) -> list[str]:
    """Sequence columns that the model reads."""
    towers = as_dict(run.results.get("model")).get("towers") or []
    named = [column for tower in towers for columns in _tower_inputs(tower) for column in columns]
    return list(dict.fromkeys(named)) or list(run.settings.get("sequence_columns") or [])


def label_name(run: RunFiles) -> str:
    """The label column's name."""
    return str(run.settings.get("label_column") or "label")


def join_words(words: Sequence[str]) -> str:
    """heavy, light and antigen."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tower_inputs(tower: Mapping[str, Any]) -> list[list[str]]:
    """Inputs of a tower: columns that are read together."""
    inputs = tower.get("inputs") or tower.get("columns") or []
    return [[part] if isinstance(part, str) else list(part) for part in inputs]


def _score_numbers(run: RunFiles) -> list[KeyNumber]:
    test = as_dict(run.results.get("test"))
    model = as_dict(as_dict(test.get("scores")).get("model"))
    if not model:
        return [KeyNumber("test score", units.NOT_MEASURED, "no test split was scored")]
    numbers = []
    for metric in ("spearman", "rmse"):
        if metric not in model:
            continue
        best = best_baseline(test, metric)
        note = f"best baseline: {units.number(best[1]['value'])}, {best[0]}" if best else "no baseline to compare with"
        entry = as_dict(model[metric])
        numbers.append(KeyNumber(f"{metric_name(metric)} on test", units.score(entry), note))
    return numbers


def _token_numbers(run: RunFiles) -> list[KeyNumber]:
    split = next((name for name in ("test", "validation") if as_dict(run.results.get(name)).get("model")), None)
    if split is None:
        return [KeyNumber("perplexity", units.NOT_MEASURED, "no split was scored")]
    model, unigram = (as_dict(run.results[split].get(name)) for name in ("model", "unigram"))
    return [
        KeyNumber(
            f"{metric} on {split}",
            show(model.get(metric)),
            f"residue frequencies: {show(unigram.get(metric))}",
        )
        for metric, show in (("perplexity", units.number), ("accuracy", units.share))
    ]


def _num_rows(run: RunFiles) -> Any:
    data, planned = as_dict(run.results.get("data")), as_dict(as_dict(run.plan.get("facts")).get("data"))
    return as_dict(data.get("sizes")).get("train", planned.get("num_rows"))


def _epochs(run: RunFiles) -> str:
    epochs = as_dict(run.results.get("train")).get("epoch")
    if not is_finite(epochs) or as_dict(run.results.get("data")).get("streaming"):  # a stream counts steps as epochs
        return ""
    return "seen once" if epochs == 1 else f"seen {epochs:.3g} times"
