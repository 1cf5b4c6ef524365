"""How fast saved models predict, side by side on the same rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.collators import SequenceCollator
from ..data.columns import read_columns
from ..models.affinity import AffinityModel
from .predictor import columns_of, load_model

BATCH_ROWS = 8
MAX_ROWS = 256
BUDGET_S = 20.0  # for all models together; one batch each is run in any case


@torch.no_grad()
def measure_speeds(
    models: Sequence[tuple[str, Mapping[str, str]]], rows: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Runs models in turns on the same batches, encoders included, as they are when loaded: no cache, no speed-ups.

    Args:
        models: per model its folder, and its columns -> columns of `rows`; columns that are not named are the same.
        rows: a table; `MAX_ROWS` at most are used, sorted by length.
        device: where to run.

    Returns:
        Per model `num_parameters` (referenced encoders included), `residues_per_s`, `num_residues` and `seconds`.

    Cost: `BUDGET_S` seconds beside loading, more only where one batch per model takes longer. The first batch warms up.
    """
    loaded = []
    for folder, columns in models:
        model: Any = load_model(folder).to(device).eval()  # type: ignore[arg-type]
        model.attach_encoders()
        collator = SequenceCollator.from_pretrained(folder)
        names = columns_of(collator)
        loaded.append((model, collator, names, [columns.get(name, name) for name in names]))
    counts = [{"num_residues": 0, "seconds": 0.0} for _ in loaded]
    batches = [_read_batches(rows, names, columns) for _, _, names, columns in loaded]
    began = time.perf_counter()
    for i, turn in enumerate(zip(*[[each[0], *each] for each in batches])):
        for (model, collator, *_), batch, count in zip(loaded, turn, counts):
            seconds = _time(model, collator, batch, device)
            if i > 0:
                count["num_residues"] += sum(len(value) for row in batch for value in row.values())
                count["seconds"] += seconds
        if i > 0 and time.perf_counter() - began > BUDGET_S:
            break
    return [
        {
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "residues_per_s": count["num_residues"] / count["seconds"],
            **count,
        }
        for (model, *_), count in zip(loaded, counts)
    ]


def _read_batches(rows: Any, names: Sequence[str], columns: Sequence[str]) -> list[list[dict[str, str]]]:
    chosen = sorted(read_columns(rows, columns)[:MAX_ROWS], key=lambda row: sum(map(len, row)))
    dicts = [dict(zip(names, row)) for row in chosen]
    return [dicts[i : i + BATCH_ROWS] for i in range(0, len(dicts), BATCH_ROWS)]


def _time(model: AffinityModel, collator: SequenceCollator, batch: list[dict[str, str]], device: torch.device) -> float:
    inputs = collator(batch)["sequences"]
    began = time.perf_counter()
    moved = {name: {key: value.to(device) for key, value in tensors.items()} for name, tensors in inputs.items()}
    model(sequences=moved).logits.cpu()  # waits for the device
    return time.perf_counter() - began
