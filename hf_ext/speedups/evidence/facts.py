"""What decisions need to know of a model and of training data, read from them; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch

from ...data import column_names, has_numbered_rows, kept_random_states, read_columns, row_lengths
from ...models import block_matrices, describe_blocks, find_blocks, find_encoders, has_adapters, unwrap_peft
from ...processes import num_elements

PADDING_SAMPLE = 20_000  # rows that the fraction of padding is estimated from


@dataclass(frozen=True)
class ModelFacts:
    """What decisions need to know of a model; `classes` are the names of its own class and that under a wrapper.

    `families`: model types of its encoders. `has_own_decoder`: a decoder of ours reads what an encoder puts out; then
    they have the model's own type too, so that the whole model is not taken for packed.
    """

    families: tuple[str, ...] = ()
    frozen_inputs: tuple[str, ...] = ()
    trains_encoders: bool = True
    num_parameters: int = 0
    num_trainable: int = 0
    blocks: str = ""  # its repeated layers, in words
    num_block_matrices: int = 0  # that train
    classes: tuple[str, ...] = ()
    has_adapters: bool = False
    has_own_decoder: bool = False
    supports_flex: bool = False  # transformers' FlexAttention


@dataclass(frozen=True)
class DataFacts:
    """What decisions need to know of the training data; None where a stream does not tell."""

    num_rows: int | None = None
    has_lengths: bool = False
    padding_share_random: float | None = None
    distinct_inputs: dict[str, int] = field(default_factory=dict)
    streaming: bool = False


def describe_model(model: Any) -> ModelFacts:
    """Names encoder families, frozen inputs and repeated layers (as `find_blocks`), counts parameters in memory."""
    if model is None:
        return ModelFacts()
    frozen = tuple(getattr(model, "frozen_inputs", ()))
    inputs = getattr(model, "embedding_sizes", {})
    config = getattr(model, "config", None)
    specs = getattr(config, "encoder_specs", None)
    families = {spec.config["model_type"] for spec in specs} if specs else {getattr(config, "model_type", None)}
    families |= set(getattr(model, "encoder_families", ()))  # of a model that is more than its encoder
    families |= {encoder.config.model_type for encoder in find_encoders(model)}  # of one around an encoder, too
    inner = unwrap_peft(model)
    return ModelFacts(
        families=tuple(sorted(filter(None, families))),
        classes=tuple(dict.fromkeys([type(inner).__name__, type(model).__name__])),
        frozen_inputs=frozen,
        trains_encoders=len(frozen) < len(inputs) or not inputs,
        num_parameters=sum(num_elements(p) for p in model.parameters()),
        num_trainable=sum(num_elements(p) for p in model.parameters() if p.requires_grad),
        blocks=describe_blocks(find_blocks(model)),
        num_block_matrices=len(block_matrices(model)),
        has_adapters=has_adapters(model),
        has_own_decoder=hasattr(model, "encoder_families"),
        supports_flex=getattr(inner, "_supports_flex_attn", False),
    )


def describe_data(dataset: Any, collator: Any, args: Any) -> DataFacts:
    """Describes row count, distinct inputs, and the padding that random batches would have."""
    if dataset is None or isinstance(dataset, Mapping):  # several are for a data loader of the user's
        return DataFacts()
    if not has_numbered_rows(dataset):
        return DataFacts(streaming=True)
    if len(dataset) == 0:  # refused where training begins; such a trainer may evaluate
        return DataFacts()
    with kept_random_states():  # of some, the first row is read
        names = column_names(dataset)
    inputs = getattr(collator, "columns", {})
    distinct = {
        name: len({parts for parts in read_columns(dataset, columns) if any(parts)})
        for name, columns in inputs.items()
        if set(columns) <= set(names)
    }
    lengths = None
    if distinct:
        lengths = row_lengths(dataset, inputs)
    elif isinstance(dataset, datasets.Dataset) and args.length_column_name in names:
        lengths = dataset[args.length_column_name][:]
    padding = None
    if lengths is not None:
        padding = padding_share(lengths, args.per_device_train_batch_size, args.pad_to_multiple_of or 1)
    return DataFacts(len(dataset), lengths is not None, padding, distinct)


def padding_share(lengths: list[int], batch_size: int, multiple: int = 1) -> float:
    """Estimates the fraction of padding in random batches of `batch_size`, from 20,000 lengths drawn with a seed.

    Batches are as wide as a `multiple`.
    """
    values = torch.tensor(lengths)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:PADDING_SAMPLE]]
    batches = shuffled.split(batch_size)
    padded = sum(-(-int(batch.max()) // multiple) * multiple * len(batch) for batch in batches)
    return 1 - int(shuffled.sum()) / max(1, padded)
