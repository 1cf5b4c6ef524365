"""What an antibody generator is made of, and the sizes that have a name."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ...arguments import ABOVE_ZERO, COUNT, FINITE, SHARE_BELOW_ONE, WIDTH, Range, check_ranges
from ...data import BOS_ID, EOS_ID, PAD_ID, SEP_ID, VOCABULARY
from ...errors import ArgumentError

SHARE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
GENERATOR_RANGES = {
    **dict.fromkeys(("d_model", "d_ff", "hidden_size"), WIDTH),
    **dict.fromkeys(("num_heads", "num_encoder_layers", "num_decoder_layers", "vocab_size"), COUNT),
    "dropout": SHARE_BELOW_ONE,
    "unknown_affinity_dropout": SHARE,
    "label_mean": FINITE,
    "label_std": ABOVE_ZERO,
}
_TRANSFORMER: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "d_ff": 512},
    "small": {"d_model": 256, "num_heads": 4, "num_encoder_layers": 3, "num_decoder_layers": 3, "d_ff": 1024},
    "full": {"d_model": 512, "num_heads": 8, "num_encoder_layers": 6, "num_decoder_layers": 6, "d_ff": 2048},
}
_LSTM: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 64, "hidden_size": 128, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "small": {"d_model": 128, "hidden_size": 256, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "full": {"d_model": 256, "hidden_size": 512, "num_encoder_layers": 2, "num_decoder_layers": 2},
}
# One layer's weights, applied so many times as the numbers of layers say.
_LIGHT = {name: {**size, "num_encoder_layers": 4, "num_decoder_layers": 4} for name, size in _TRANSFORMER.items()}
# Architecture -> name -> settings. `esm` has the Transformer's decoder; its encoder is whichever is named.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "lstm": _LSTM,
    "transformer": _TRANSFORMER,
    "light": _LIGHT,
    "esm": _TRANSFORMER,
}


class GeneratorConfig(PretrainedConfig):
    """Configuration of `AntibodyGenerator`.

    Args:
        architecture: "lstm"; "transformer" (T5's layers: pre-norm, relative positions); "light" (linear attention, one
            encoder and one decoder layer, each applied several times); "esm" (a pretrained encoder, the Transformer's
            decoder).
        d_model: width of embeddings, and of all layers but those of the LSTM.
        num_heads, d_ff: of attention, and the width between the two feed-forward layers; not of the LSTM.
        num_encoder_layers, num_decoder_layers: of "light", how many times its one layer is applied.
        hidden_size: of the LSTM's states, in each direction.
        attend: whether the LSTM's decoder attends to the encoder's states; else it sees its final states alone.
        dropout: probability, wherever the architecture has dropout; none in attention weights, as in ESM-2: it would be
            drawn for every pair of tokens, and all weights kept in memory.
        label_mean, label_std: of the affinity, in its units (pKd), by which it is standardised.
        unknown_affinity_dropout: probability in training that a row's affinity is taken as unknown, so that the model
            can also write without one (classifier-free guidance).
        needs_light: whether every training antibody had a light chain, so that a heavy chain alone is a fault.
        antigen_encoder: `EncoderSpec` as a dict, of "esm".
        save_full: save a frozen encoder's weights too, instead of its id, revision and fingerprint.

    Raises:
        ArgumentError: no such architecture, a number outside of its range, a width that heads do not divide, or an
            encoder that is missing for "esm" or given to another.
    """

    model_type = "hf_ext_generator"
    keys_to_ignore_at_inference = ["cache", "encoder_last_hidden_state"]

    architecture: str = "transformer"
    vocab_size: int = len(VOCABULARY)
    d_model: int = 128
    num_heads: int = 4
    num_encoder_layers: int = 2
    num_decoder_layers: int = 2
    d_ff: int = 512
    hidden_size: int = 128
    attend: bool = False
    dropout: float = 0.1
    label_mean: float = 0.0
    label_std: float = 1.0
    unknown_affinity_dropout: float = 0.0
    needs_light: bool = True
    antigen_encoder: None | dict = None  # noqa: RUF036
    save_full: bool = False
    is_encoder_decoder: bool = True
    use_cache: bool = True
    pad_token_id: int = PAD_ID
    bos_token_id: int = BOS_ID
    eos_token_id: int = EOS_ID
    sep_token_id: int = SEP_ID
    decoder_start_token_id: int = BOS_ID
    tie_word_embeddings: bool = False  # what is tied here is one weight, not two

    def __post_init__(self, **kwargs: object):
        if self.architecture not in SIZES:
            raise ArgumentError(f"architecture={self.architecture!r}: allowed are {', '.join(SIZES)}.")
        check_ranges(self, GENERATOR_RANGES)
        if self.architecture != "lstm" and self.d_model % self.num_heads:
            raise ArgumentError(f"d_model={self.d_model} with num_heads={self.num_heads}: must be a multiple of it.")
        if self.architecture != "lstm" and self.d_model % 2:
            raise ArgumentError(f"d_model={self.d_model}: must be even, half of it sines and half cosines.")
        if self.architecture == "lstm" and self.num_encoder_layers != self.num_decoder_layers:
            raise ArgumentError(
                f"num_encoder_layers={self.num_encoder_layers} with num_decoder_layers={self.num_decoder_layers}: must "
                "be equal, since each layer of an LSTM's decoder starts from one of the encoder's."
            )
        if (self.architecture == "esm") != (self.antigen_encoder is not None):
            raise ArgumentError(
                f"architecture={self.architecture!r} with antigen_encoder "
                f"{'missing' if self.antigen_encoder is None else 'given'}: it belongs to esm, and to no other."
            )
        super().__post_init__(**kwargs)

    @classmethod
    def of_size(cls, architecture: str, size: str, **settings: Any) -> GeneratorConfig:
        """Builds the configuration of a named size; `settings` go over it.

        Args:
            size: "tiny", "small" or "full".

        Raises:
            ArgumentError: as the class; or no such size.
        """
        named = SIZES.get(architecture, {size: {}})  # of an unknown architecture the class says so
        if size not in named:
            raise ArgumentError(f"size={size!r}: allowed are {', '.join(named)}.")
        return cls(architecture=architecture, **{**named[size], **settings})
