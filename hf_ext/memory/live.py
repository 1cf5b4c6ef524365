"""The model of a run, as it stands before step 1, and its longest rows: what the ledger is asked about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..data.columns import row_lengths
from ..data.random_states import kept_random_states
from ..models.affinity import AffinityModel
from ..models.lora import unwrap_peft
from .batches import affinity_batch, give_layouts, masked_lm_batch
from .probe import Subject


def longest_batch(dataset: Any, collator: Any, rows: int) -> dict[str, Any]:
    """The collator's batch of the `rows` longest rows; of the first ones where no lengths are known.

    The random states of the process, and the collator, are as they were before.
    """
    chosen: Any = range(min(rows, len(dataset)))
    columns = getattr(collator, "columns", None)
    with kept_random_states(dataset, collator):
        if columns:
            lengths = row_lengths(dataset, columns)
            chosen = sorted(range(len(lengths)), key=lengths.__getitem__)[-rows:]
        return dict(copy.copy(collator)([dataset[i] for i in chosen]))


def describe_run(model: Any, batch: dict[str, Any], kind: str, pattern: str | None = None) -> tuple[Subject, int]:
    """What the ledger is asked about, and the tokens of a row.

    Batches of other sizes are made for the models of hf_ext's tasks; of others there is this one alone.

    Args:
        model: with everything applied that the plan applies.
        batch: from `longest_batch`.
        kind: as `Hardware.kind`.
        pattern: of the names of repeated layers, as of `find_blocks`.
    """
    known = _sizes(model, batch)
    if known is not None:
        make, length = known
        blocked = any("blocked" in str(getattr(c, "_attn_implementation", "")) for c in _configs(model))
        return Subject(model, make, kind, give_layouts, scales=not blocked, pattern=pattern), length
    length = next((tensor.shape[1] for name, tensor in batch.items() if name == "input_ids"), 1)
    one: dict[str, Any] = {"scales": False, "has_one_batch": True, "pattern": pattern}
    return Subject(model, lambda rows: batch, kind, give_layouts, **one), length


def _sizes(model: Any, batch: dict[str, Any]) -> tuple[Callable[[int], dict[str, Any]], int] | None:
    if isinstance(model, AffinityModel):
        lengths = {name: part["input_ids"].shape[1] for name, part in batch.get("sequences", {}).items()}
        embedded = {name: part.shape[1] for name, part in batch.get("embeddings", {}).items()}
        return affinity_batch(lengths, embedded), max(1, sum(lengths.values()))
    inner = unwrap_peft(model)
    if type(inner).__name__.endswith("ForMaskedLM") and set(batch) <= {*_MASKED_LM, "layout"}:
        length = batch["input_ids"].shape[1]
        # A head that computes at labels only reads where they are from the batch, where the collator says it not.
        return masked_lm_batch(length, locates_labels="forward" in vars(inner)), length
    return None


_MASKED_LM = ("input_ids", "attention_mask", "labels", "token_type_ids")


def _configs(model: Any) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]
