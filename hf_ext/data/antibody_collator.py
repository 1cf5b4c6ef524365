"""Rows of an antigen and an antibody to a batch in which each antigen stands once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import DataError
from .batch_layout import IGNORED, LayoutMaker
from .columns import read_columns

ANTIGEN_TOKENIZER = "tokenizers/0"  # in a generator's folder
StatesOf = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


class AntibodyCollator:
    """Makes a generator's batches from rows of `PairEncoder.encode_rows`.

    Rows with the same antigen share one entry: the encoder runs once per distinct antigen of a batch.

    Args:
        pad_token_id: of the antigens' vocabulary; it only fills up, `attention_mask` says what counts.
        states_of: token ids of distinct antigens to their states, (tokens, width) each, of a frozen encoder
            (`hf_ext.embeddings.dataset.StateTable`); None: the model encodes them.
        antigen_tokenizer: of a pretrained encoder, which is saved with the model; None: the generator's own.

    Attributes:
        layout: which parts of a `BatchLayout` batches bring along; None for none. Speed-ups set it. Of packed encoders
            it says where the distinct antigens stand without padding.
    """

    def __init__(self, pad_token_id: int = 0, states_of: StatesOf | None = None, antigen_tokenizer: Any = None):
        self.pad_token_id, self.states_of, self.antigen_tokenizer = pad_token_id, states_of, antigen_tokenizer
        self.layout: LayoutMaker | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One batch of n rows with k distinct antigens.

        Returns:
            `labels`: (n, longest pair), int64, -100 where padding is; where rows have any. First, because Trainer takes
            the first tensor's rows for the batch's. `affinity`: (n,), float32, NaN where unknown or not given.
            `antigen_index`: (n,), int64: which antigen each row has. `input_ids`: (k, longest antigen), int64, in the
            order in which they first occur; `attention_mask`: of that shape, int64. With `states_of`, `encoder_outputs`
            in place of `input_ids`: one tensor in a tuple, (k, longest antigen, width), zero where padding is.

        Raises:
            DataError: no rows; labels in some rows only; or an affinity that is infinite.
        """
        if not rows:
            raise DataError("A batch of no rows: give at least one.")
        batch: dict[str, Any] = {}
        num_labelled = sum(row.get("labels") is not None for row in rows)
        if num_labelled not in (0, len(rows)):
            raise DataError(f"{num_labelled} of {len(rows)} rows of a batch have labels: give them to all, or to none.")
        if num_labelled:
            labels = [torch.as_tensor(np.asarray(row["labels"], np.int64)) for row in rows]
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        batch["affinity"] = torch.tensor([_affinity(row) for row in rows])
        distinct: dict[bytes, np.ndarray] = {}
        keys = []
        for row in rows:
            ids = np.asarray(row["input_ids"], np.int64)
            keys.append(ids.tobytes())
            distinct.setdefault(keys[-1], ids)
        number = {key: i for i, key in enumerate(distinct)}
        batch["antigen_index"] = torch.tensor([number[key] for key in keys])
        return {**batch, **self._antigens(list(distinct.values()), batch.get("labels"))}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer of a pretrained encoder to `<folder>/tokenizers/0`; without one nothing."""
        if self.antigen_tokenizer is not None:
            self.antigen_tokenizer.save_pretrained(Path(folder) / ANTIGEN_TOKENIZER)

    def count_tokens(self, dataset: Any) -> np.ndarray:
        """(rows, 2), int64: tokens of each row's antigen and of its antibody, which are padded each on its own.

        An upper bound of what is computed: an antigen that several rows of a batch share counts in each.
        """
        columns = read_columns(dataset, ["input_ids", "labels"])
        return np.array([[len(antigen), len(pair)] for antigen, pair in columns], np.int64).reshape(-1, 2)

    def _antigens(self, antigens: list[np.ndarray], labels: torch.Tensor | None) -> dict[str, Any]:
        ids = pad_sequence([torch.as_tensor(a) for a in antigens], batch_first=True, padding_value=self.pad_token_id)
        lengths = torch.tensor([len(antigen) for antigen in antigens])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        if self.states_of is not None:
            states = self.states_of(antigens)
            return {"encoder_outputs": (pad_sequence(states, batch_first=True),), "attention_mask": mask}
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self.layout is None:
            return batch
        return self.layout.add_to({**batch, **({} if labels is None else {"labels": labels})})


def _affinity(row: Mapping[str, Any]) -> float:
    value = row.get("affinity")
    number = math.nan if value is None else float(value)
    if math.isinf(number):
        raise DataError(f"A row's affinity is {value!r}: must be finite, or NaN where it is unknown.")
    return number
