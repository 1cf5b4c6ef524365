"""The families of encoders that recipes take, one line each: whose models they are, and what differs between them.

And which published encoder a device should take: the best that fits its memory and is not too slow on it, for the
doctor, for `--encoders` left out and for the tables in docs/. Rates and bytes are computed, not measured: two FLOPs per
weight and token forward, as many again for gradients of states and of weights, at 30 % of the published peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError
from ..files import Facts
from ..hardware import Hardware
from .configuration import Training

# Where a token stands: by distance alone; by a table, which ends at `max_position_embeddings`; by either, as the
# configuration says.
Positions = Literal["by distance", "by table", "as configured"]


@dataclass(frozen=True)
class Family:
    """What is known of a model type of transformers.

    Attributes:
        models: the published ones, for messages.
        lora_targets: last parts of the names of the linear layers that LoRA adapts.
        layers: name of the list of its layers.
        final_norm: name of the norm that the last layer's states pass through; None where each layer ends with its own.
        positions: see `Positions`; sequences longer than a table are cut or refused.
        has_first_token: whether the first token stands for the sequence (`--pooling cls`).
        reads_text: an encoder beside a decoder, which AutoModel would build too.
    """

    models: str
    lora_targets: tuple[str, ...]
    layers: str
    final_norm: str | None = None
    positions: Positions = "by distance"
    has_first_token: bool = True
    reads_text: bool = False


_BERT_LINEAR = ("query", "key", "value", "dense")
_T5_LINEAR = ("q", "k", "v", "o", "wi", "wo", "wi_0", "wi_1")  # wi_0 and wi_1 where the feed-forward layer is gated
_ESMC_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NEOX_LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_T5_LAYERS = ("encoder.block", "encoder.final_layer_norm")
FAMILIES: dict[str, Family] = {
    "esm": Family(
        *("ESM-2, ESM-1b", _BERT_LINEAR, "encoder.layer", "encoder.emb_layer_norm_after"),
        positions="as configured",
    ),
    "esmc": Family("ESM C", _ESMC_LINEAR, "layers", "norm"),
    "t5": Family("ProtT5, ProstT5, Ankh, IgT5", _T5_LINEAR, *_T5_LAYERS, has_first_token=False, reads_text=True),
    "mt5": Family("mT5", _T5_LINEAR, *_T5_LAYERS, has_first_token=False, reads_text=True),
    "umt5": Family("UMT5", _T5_LINEAR, *_T5_LAYERS, has_first_token=False, reads_text=True),
    "bert": Family("ProtBERT, IgBert, AntiBERTy", _BERT_LINEAR, "encoder.layer", positions="by table"),
    "roformer": Family("AntiBERTa2", _BERT_LINEAR, "encoder.layer", positions="by table"),
    "modernbert": Family("ModernBERT", ("Wqkv", "Wo", "Wi"), "layers", "final_norm"),
    # Reads from left to right, so that its first token has seen nothing.
    "gpt_neox": Family("p-IgGen", _NEOX_LINEAR, "layers", "final_layer_norm", has_first_token=False),
}


def check_family(name_or_path: str, config: Facts, what: str = "Encoder") -> None:
    """Refuses a model of another type, whose layers were not tried here, and an ESM without a padding token.

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


def limit_of_positions(config: Facts) -> int | None:
    """Counts tokens, special ones included, for which a model has positions; None where they go by distance.

    Args:
        config: a model's configuration as a dictionary, with "model_type".
    """
    model_type = config["model_type"]
    limit = config.get("max_position_embeddings")
    if limit is None or model_type not in FAMILIES:  # the tokenizer decides
        return None
    positions = FAMILIES[model_type].positions
    is_relative = positions == "as configured" and config.get("position_embedding_type", "absolute") != "absolute"
    if positions == "by distance" or is_relative:
        return None
    return int(limit) - (int(config["pad_token_id"]) + 1 if model_type == "esm" else 0)  # ESM-1b counts from there


# --- which one a device should take -----------------------------------------------------------------------------------


TOKENS = 8192  # in one pass, layers computed again in the backward pass
SHARE_OF_PEAK = 0.3
LEAST_RATE = {"cuda": 5000, "rocm": 5000, "mps": 500, "cpu": 500}  # residues a second, by kind of device
FLOPS_PER_WEIGHT = {"frozen": 2, "lora": 4, "full": 6}
STORED_BYTES = {"frozen": 2, "lora": 2, "full": 16}  # of a weight; that which trains has gradients and AdamW's states
LAYER_BYTES = 60  # per token and unit of width: what one layer keeps
INPUT_BYTES = 4  # and what goes into each
USABLE = 0.91  # of a card's nominal memory, as drivers report it
# Of devices that publish no peak: ESM-2 8M trains at about 3,000 residues/s on two cores (compare_mlm_8M_cpu.json).
UNPUBLISHED_TFLOPS = 3000 * 6 * 7.4e6 / SHARE_OF_PEAK / 1e12


@dataclass(frozen=True)
class Candidate:
    """A published encoder: its id on the Hub; layers, their width and their weights.

    `loss`: of masked residues of UniRef50's validation sequences, nats (Synthyra/SpeedrunningPLMs, README, 2026-06).
    """

    name: str
    num_layers: int
    width: int
    num_parameters: float
    loss: float

    def needed_bytes(self, training: Training) -> float:
        """Counts bytes of weights, optimizer states, and activations of `TOKENS` tokens, recomputed by layer."""
        layers = 0 if training == "frozen" else self.num_layers
        activations = TOKENS * self.width * (LAYER_BYTES + layers * INPUT_BYTES)
        return STORED_BYTES[training] * self.num_parameters + activations

    def expected_rate(self, training: Training, hardware: Hardware) -> float:
        """Estimates residues a second."""
        peaks = hardware.peak_tflops
        peak = peaks.get("bf16" if hardware.native_bf16 else "fp16") or peaks.get("fp32") or UNPUBLISHED_TFLOPS
        return SHARE_OF_PEAK * peak * 1e12 / (FLOPS_PER_WEIGHT[training] * self.num_parameters)


# The best first. ESM-2 650M is left out: ESM C has half of its weights and a lower loss.
CANDIDATES = (
    Candidate("facebook/esm2_t36_3B_UR50D", 36, 2560, 2831.2e6, 2.053),
    Candidate("biohub/ESMC-600M", 36, 1152, 573.3e6, 2.109),
    Candidate("biohub/ESMC-300M", 30, 960, 331.8e6, 2.161),
    Candidate("facebook/esm2_t30_150M_UR50D", 30, 640, 147.6e6, 2.324),
    Candidate("facebook/esm2_t12_35M_UR50D", 12, 480, 33.2e6, 2.453),
    Candidate("facebook/esm2_t6_8M_UR50D", 6, 320, 7.4e6, 2.575),
)


def choose_encoder(hardware: Hardware, training: Training = "frozen") -> Candidate:
    """Chooses the encoder for a device: the lowest loss of those that fit and are fast enough; else the smallest."""
    room = float("inf") if hardware.memory_gib is None else hardware.memory_gib * 2**30 * USABLE
    for candidate in CANDIDATES:
        is_fast = candidate.expected_rate(training, hardware) >= LEAST_RATE[hardware.kind]
        if is_fast and candidate.needed_bytes(training) <= room:
            return candidate
    return CANDIDATES[-1]
