"""Rows of tokens with a number to predict, and rows made into batches: of one length, or padded."""

from typing import Any

import torch
from datasets import Dataset
from miniature_esm import PAD

IGNORED = -100


def make_number_rows(num: int, seed: int = 1, **labels: float) -> Dataset:
    """Rows of 6 tokens with labels between 0.4 and 2.3, a tenth of the first token; `row3=nan` replaces one."""
    ids = torch.randint(4, 24, (num, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    values = [row[0] / 10 for row in ids]
    for name, value in labels.items():
        values[int(name.removeprefix("row"))] = value
    return Dataset.from_dict({"input_ids": ids, "labels": values})


def stack_rows(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows of one length, without padding."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch padded on the right; labels of tokens are padded with what a loss ignores, those of rows are stacked."""
    width = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (width - len(values))

    labels = [row["labels"] for row in rows]
    if isinstance(labels[0], list) and isinstance(labels[0][0], int):  # several numbers of a row are not of tokens
        labels = [pad(values, IGNORED) for values in labels]
    ids = torch.tensor([pad(row["input_ids"], PAD) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": torch.tensor(labels)}


class RecordingCollator:
    """Pads, and notes which rows, by their column `row`, came in which batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.batches.append([row["row"] for row in rows])
        return pad_rows(rows)
