"""A run that would learn nothing is refused by the name of what leaves it nothing; so is a word that means nothing.

So are rows that no step can take: their labels are no labels, or they are longer than the model.

Trainer 5.23 reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from pyarrow import compute
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ..argument_checks import check_choices
from ..data.columns import column_names, column_values, has_numbered_rows
from ..errors import ArgumentError, DataError
from ..models.lora import unwrap_peft

logger = logging.getLogger(__name__)

NUM_FIRST_ROWS = 16
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "labels"}  # beside other inputs, one text may be right
_REMEDY = "Many tokenizers for proteins want blanks between residues, ' '.join(sequence), others want capitals."


def check_training(args: TrainingArguments, rows: Any, model: Any = None) -> None:
    """Before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where somebody else makes its loader.
        model: that it will train.

    Raises:
        ArgumentError: the arguments ask for no step; a word that is no choice was assigned to one after they were
            built; adapters whose ranks nobody would change (AdaLoRA).
        DataError: there are no rows.
    """
    check_choices(args)
    if has_numbered_rows(rows) and len(rows) == 0:
        _refuse_empty(args, 0)  # torch's sampler would speak of num_samples
    if args.max_steps == 0:
        raise ArgumentError(
            "max_steps=0 trains nothing. Give a number of optimizer steps, or leave it out (-1) to train for "
            "num_train_epochs. To score a model as it is, call `evaluate` or `predict`."
        )
    if args.max_steps < 0 and not (args.num_train_epochs > 0 and math.isfinite(args.num_train_epochs)):
        raise ArgumentError(
            f"num_train_epochs={args.num_train_epochs:g}: must be a number above 0, or nothing is trained; fractions "
            "are allowed. To score a model as it is, call `evaluate` or `predict`."
        )
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if config.peft_type == "ADALORA":
            raise ArgumentError(
                f"adapter {name!r} is AdaLoRA: its ranks change by a call after each step, which Trainer does not "
                "make, and no checkpoint holds what it gathers. Use LoraConfig; use_dora=True makes it DoRA."
            )


def check_batches(args: TrainingArguments, loader: Any) -> None:
    """Raises ArgumentError where `dataloader_drop_last` leaves `loader` no batch, DataError where it has no rows."""
    if has_length(loader) and len(loader) == 0:
        rows = getattr(loader, "dataset", None)
        _refuse_empty(args, len(rows) if rows is not None and has_length(rows) else 0)


def check_rows(name: str, rows: Any, model: Any, collator: Any, num_seen: float = math.inf) -> None:
    """Looks at labels, and at lengths where the model has no more positions; of transformers' models and collators.

    Others may do anything with rows, and so do transforms; models that count positions from their padding token take
    longer rows of padding. Cost: one look at a column, or two.

    Args:
        name: of the data, for messages.
        rows: a `Dataset`, or a list of dictionaries, whose lengths are not looked at.
        num_seen: so many rows are read; where there are more, a row may not come up, and none is looked at.

    Raises:
        DataError: a label that is text, None to train on, or a class the model does not have; a row that is too long.
    """
    inner, is_list = unwrap_peft(model), isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    is_read = is_list or (isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom")
    modules = f"{type(inner).__module__} {getattr(collator, '__module__', '')}"
    if not is_read or not 0 < len(rows) <= num_seen or modules.count("transformers.") < 2:
        return
    kind, config, names = type(inner).__name__, inner.config, {*column_names(rows)}
    is_one_of = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    needed = f"a whole number from 0 to {config.num_labels - 1} (num_labels)" if is_one_of else "a number"
    for column in {"label", "labels"} & names if kind.endswith("ForSequenceClassification") else ():
        for i, value in enumerate([row.get(column) for row in rows] if is_list else column_values(rows, column)):
            is_other = is_one_of and isinstance(value, int) and value != -100 and not 0 <= value < config.num_labels
            if (value is None and name == "train") or isinstance(value, str) or is_other:  # else there is no loss
                raise DataError(f"{name} data, row {i}, column {column!r}: {value!r}, but {kind} takes {needed}.")
    layers = [part for path, part in inner.named_modules() if path.endswith((".position_embeddings", ".wpe"))]
    if len(layers) == 1 and getattr(layers[0], "padding_idx", 0) is None and "input_ids" in names and not is_list:
        tables = rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000)
        lengths = np.concatenate([compute.list_value_length(table["input_ids"]).to_numpy() for table in tables])
        limit, row = layers[0].num_embeddings, int(lengths.argmax())
        if lengths[row] > limit:
            problem = f"{name} data, row {row}: {lengths[row]} tokens, but {kind} has {limit} positions."
            raise DataError(f"{problem} Cut rows when tokenizing: truncation=True, max_length={limit}.")


def _refuse_empty(args: TrainingArguments, num_rows: int) -> None:
    """Raises what says why there is no batch."""
    if num_rows == 0:
        raise DataError("The training set has no rows: nothing can be trained.")
    rows = args.train_batch_size * args.world_size
    raise ArgumentError(
        f"dataloader_drop_last leaves no batch: {num_rows} training rows are fewer than the {rows} of one batch "
        f"(per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). Leave "
        "dataloader_drop_last out, or lower per_device_train_batch_size."
    )


def look_at_first_rows(seen: list[tuple[tuple[int, ...], str, str]], batch: Any, tokenizer: Any) -> None:
    """Warns where the first rows that train are nearly all alike in token ids: a tokenizer may not know their text.

    Args:
        seen: ids, labels and all inputs of rows of batches before; those of `batch` are added, until there are enough.

    Raises:
        DataError: all have the same ids (mask, types), but not the same labels, and there is no other input.

    Cost: one read from the device for each of the first batches.
    """
    ids, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "labels"))
    if len(seen) >= NUM_FIRST_ROWS or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return
    unknown, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "pad"))
    told = labels.tolist() if isinstance(labels, torch.Tensor) and labels.dim() else [""] * len(ids)
    beside = [batch.get(name, ids).tolist() for name in ("attention_mask", "token_type_ids")]
    for label, *columns in zip(told, ids.tolist(), *beside):
        tokens = [values for values in zip(*columns) if values[0] != pad]
        seen.append((tuple(token for token, *_ in tokens), str(label), str(tokens)))
    if len(seen) < NUM_FIRST_ROWS:
        return
    rows, answers, inputs = zip(*seen)
    ((given, times),) = Counter(inputs).most_common(1)
    special = {*getattr(tokenizer, "all_special_ids", ())} - {unknown}
    is_unknown = [token == unknown for row in rows for token in row if token not in special]
    share = sum(is_unknown) / max(1, len(is_unknown))
    said = (
        [f"{share:.0%} of the tokens of the first {len(rows)} rows are {tokenizer.unk_token!r}"] if share > 0.5 else []
    )
    if set(batch) <= _TEXT and len(set(answers)) > 1 and times > 0.9 * len(rows):
        ids = [*rows[inputs.index(given)][:8]]
        said.append(f"{times} of the first {len(rows)} rows have the same token ids {ids}, not the same labels")
        if times == len(rows):
            raise DataError(f"{'; '.join(said)}: nothing can be learned. {_REMEDY}")
    if said:
        logger.warning("%s. %s", "; ".join(said), _REMEDY)
