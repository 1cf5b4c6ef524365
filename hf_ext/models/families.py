"""The families of encoders that recipes take, one line each: whose models they are, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ArgumentError

# Where a token stands: by distance alone; by a table, which ends at `max_position_embeddings`; by either, as the
# configuration says.
Positions = Literal["by distance", "by table", "as configured"]


@dataclass(frozen=True)
class Family:
    """What is known of a model type of transformers.

    Attributes:
        models: the published ones, for messages.
        lora_targets: last parts of the names of the linear layers that LoRA adapts.
        positions: see `Positions`; sequences longer than a table are cut or refused.
        has_first_token: whether the first token stands for the sequence (`--pooling cls`).
        reads_text: an encoder beside a decoder, which AutoModel would build too.
    """

    models: str
    lora_targets: tuple[str, ...]
    positions: Positions = "by distance"
    has_first_token: bool = True
    reads_text: bool = False


_BERT_LINEAR = ("query", "key", "value", "dense")
_T5_LINEAR = ("q", "k", "v", "o", "wi", "wo", "wi_0", "wi_1")  # wi_0 and wi_1 where the feed-forward layer is gated
_ESMC_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NEOX_LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FAMILIES: dict[str, Family] = {
    "esm": Family("ESM-2, ESM-1b, SaProt", _BERT_LINEAR, "as configured"),
    "esmc": Family("ESM C", _ESMC_LINEAR),
    "t5": Family("ProtT5, ProstT5, Ankh, IgT5", _T5_LINEAR, has_first_token=False, reads_text=True),
    "mt5": Family("mT5", _T5_LINEAR, has_first_token=False, reads_text=True),
    "umt5": Family("UMT5", _T5_LINEAR, has_first_token=False, reads_text=True),
    "bert": Family("ProtBERT, IgBert, AntiBERTy", _BERT_LINEAR, "by table"),
    "roformer": Family("AntiBERTa2", _BERT_LINEAR, "by table"),
    "modernbert": Family("ModernBERT", ("Wqkv", "Wo", "Wi")),
    # Reads from left to right, so that its first token has seen nothing.
    "gpt_neox": Family("p-IgGen", _NEOX_LINEAR, has_first_token=False),
}


def check_family(name_or_path: str, config: Mapping[str, Any], what: str = "Encoder") -> None:
    """Refuses a model of another type, whose layers nobody has tried here, and an ESM without a padding token.

    Raises:
        ArgumentError: with the types that are served, and what to take.
    """
    model_type = config["model_type"]
    if model_type == "esm" and config.get("pad_token_id") is None:
        raise ArgumentError(f"{name_or_path!r}: its config.json has no pad_token_id, which ESM counts positions from.")
    if model_type in FAMILIES:
        return
    served = ", ".join(f"{name} ({family.models})" for name, family in FAMILIES.items())
    raise ArgumentError(
        f"{what} {name_or_path!r} is of type {model_type!r}; recipes take {served}. Take ESM C (biohub/ESMC-300M), or "
        "train that model in a script of your own with FastTrainer, which takes any."
    )


def limit_of_positions(config: Mapping[str, Any]) -> int | None:
    """Tokens, special ones included, for which a model has positions; None where they go by distance.

    Args:
        config: a model's configuration as a dictionary, with "model_type".
    """
    model_type, limit = config["model_type"], config.get("max_position_embeddings")
    if limit is None or model_type not in FAMILIES:  # the tokenizer decides
        return None
    positions = FAMILIES[model_type].positions
    is_relative = positions == "as configured" and config.get("position_embedding_type", "absolute") != "absolute"
    if positions == "by distance" or is_relative:
        return None
    return int(limit) - (int(config["pad_token_id"]) + 1 if model_type == "esm" else 0)  # ESM-1b counts from there
