"""AntibodyGenerator: reads an antigen and, if known, an affinity; writes an antibody, token by token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import Seq2SeqLMOutput

from ...data import BOS_ID, PAD_ID, UNKNOWN_ID, VarlenLayout
from ...errors import ArgumentError
from ...labels import UNKNOWN
from ..lora import merge_layers
from ..losses import exact_loss
from .configuration import GeneratorConfig
from .esm import PretrainedEncoder
from .light import LightDecoder, LightEncoder
from .lstm import LstmDecoder, LstmEncoder
from .parts import AffinityEmbedding, EncoderStates
from .transformer import TransformerDecoder, TransformerEncoder

# No antibody can be made of them; after few steps they would be drawn all the same.
NEVER_WRITTEN = [PAD_ID, BOS_ID, UNKNOWN_ID]
_PARTS: dict[str, tuple[Any, Any]] = {
    "lstm": (LstmEncoder, LstmDecoder),
    "transformer": (TransformerEncoder, TransformerDecoder),
    "light": (LightEncoder, LightDecoder),
    "esm": (PretrainedEncoder, TransformerDecoder),
}


class AntibodyGenerator(PreTrainedModel, GenerationMixin):
    """An encoder of antigens and a decoder of antibodies; which ones, `config.architecture` says.

    The affinity's embedding is added to that of each token that the decoder reads, whatever the architecture; the
    encoder does not see it, so that rows with one antigen share its states. `generate` is that of transformers; pass
    it `affinity`, (rows,), as to `forward`.
    """

    config_class = GeneratorConfig
    base_model_prefix = "generator"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    loss_kind = "tokens"  # what `exact_loss` and the loss of an evaluation count
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["T5Block", "EsmLayer", "EsmcLayer"]
    _is_stateful = True  # sums and LSTM states cannot be cut back by a token, as assisted generation would

    def __init__(self, config: GeneratorConfig):
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.affinity = AffinityEmbedding(
            config.d_model, config.label_mean, config.label_std, config.unknown_affinity_dropout
        )
        encoder, decoder = _PARTS[config.architecture]
        self.encoder = encoder(config)
        widths = (self.encoder.width,) if config.architecture == "esm" else ()
        self.decoder = decoder(config, *widths)
        # The Transformers' output is the embedding once more; the LSTM's states have another width.
        self.output = nn.Linear(config.hidden_size, config.vocab_size) if config.architecture == "lstm" else None
        self.post_init()
        self.generation_config.suppress_tokens = NEVER_WRITTEN

    @property
    def encoder_families(self) -> tuple[str, ...]:
        """Model types of encoders that run in each step; none where states are cached, nor for encoders of our own."""
        if self.config.architecture == "transformer":
            return ("t5",)
        if self.config.architecture == "esm" and self.encoder.spec.training != "frozen":
            return (self.encoder.family,)
        return ()

    @classmethod
    def from_new_weights(cls, config: GeneratorConfig) -> AntibodyGenerator:
        """Builds a generator to be trained: all weights new but those of a pretrained encoder that trains.

        Raises:
            ArgumentError: that encoder cannot be loaded.
        """
        model = cls(config)
        if config.architecture == "esm":
            model.encoder.load_pretrained()
        return model.train()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads as transformers does; of a pretrained encoder those weights train that did."""
        loaded: Any = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config.architecture == "esm":
            model.encoder.set_trainable()
        return loaded

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Does what transformers does; an LSTM and the light Transformer have no layers to recompute: nothing."""
        if self.config.architecture in ("transformer", "esm"):
            super().activation_checkpointing_enable(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Saves as transformers does, with the names of the modules: see `AffinityModel.save_pretrained`."""
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, **kwargs)

    def merge_adapters(self) -> int:
        """Adds the adapters of a pretrained encoder into its weights, in place, which train in full from then on.

        Returns:
            How many there were.

        Raises:
            ArgumentError: there are none.
        """
        if self.config.architecture != "esm" or self.encoder.spec.training != "lora":
            raise ArgumentError("This generator has no adapters to merge: its antigen encoder did not train with LoRA.")
        num_layers = merge_layers(self.encoder.model)
        spec = self.encoder.spec
        spec.training = "full"
        spec.lora = {}
        self.encoder.set_trainable()
        self.config.antigen_encoder = asdict(spec)
        return num_layers

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws weights at T5's scales (outputs as large as inputs) for layers that are not T5's own."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=1.0)
        else:
            super()._init_weights(module)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Returns False: the decoder makes what it caches, keys and values in two of the architectures only."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns what the decoder reads to write `labels`, (rows, tokens): `<bos>`, then all but the last."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        ids = torch.cat([start, labels[:, :-1]], dim=1)
        return ids.masked_fill(ids.eq(UNKNOWN), self.config.pad_token_id)

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        layout: VarlenLayout | None = None,
    ) -> EncoderStates:
        """Returns the encoder's states of k antigens: those given, or those of `input_ids`, (k, tokens).

        Raises:
            ArgumentError: neither is given.
        """
        if isinstance(encoder_outputs, EncoderStates):
            return encoder_outputs
        if encoder_outputs is not None:
            is_tensor = isinstance(encoder_outputs, Tensor)
            return EncoderStates(last_hidden_state=encoder_outputs if is_tensor else encoder_outputs[0])
        if input_ids is None:
            raise ArgumentError("No antigen: give input_ids, or its states as encoder_outputs.")
        return self.encoder(input_ids, attention_mask, layout)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: object = None,
        antigen_index: Tensor | None = None,
        affinity: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        layout: VarlenLayout | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Scores of each next token of n rows, and the loss.

        Args:
            input_ids, attention_mask: (k, antigen tokens), int64; padding may stand on either side.
            labels: (n, tokens), int64, what is to be written, without `<bos>`; -100 is left out of the loss.
            decoder_input_ids: (n, tokens), int64, with `<bos>`; None: made from `labels`. After `cache` only those
                that it has not seen.
            encoder_outputs: states of the k antigens, (k, tokens, width), in place of `input_ids`, as a tensor or
                the first entry of a tuple. Of the LSTM, what `encode` returns.
            antigen_index: (n,), int64, which antigen each row has; None: n = k, in their order.
            affinity: (n,), float, in the units of `config.label_mean`; NaN: unknown. None: unknown in all rows.
            cache: what this model returned for the tokens before.
            use_cache: return the cache; None: as in the configuration, but not where there are labels.
            num_items_in_batch: labels in the whole effective batch; None: those here.
            layout: a batch's `BatchLayout`, for encoders that run without padding.
            return_dict: False: a tuple.

        Returns:
            `Seq2SeqLMOutput`: `loss`, the summed cross entropy by `num_items_in_batch`, scalar, float32; `logits`,
            (n, tokens, vocabulary); `cache`; `encoder_last_hidden_state`, of the k antigens.

        Raises:
            ArgumentError: no antigen, nothing to write, or numbers of rows that do not fit.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ArgumentError("Nothing to write: give labels, or decoder_input_ids. (generate needs neither.)")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        encoded = self.encode(input_ids, attention_mask, encoder_outputs, layout)
        of_rows, mask = _of_rows(encoded, attention_mask, antigen_index, len(decoder_input_ids))
        if affinity is not None and affinity.shape != (len(decoder_input_ids),):
            raise ArgumentError(
                f"affinity has shape {tuple(affinity.shape)}, there are {len(decoder_input_ids)} rows: give one number "
                "for each, NaN where it is unknown."
            )
        embedded = self.shared(decoder_input_ids) + self.affinity(affinity, len(decoder_input_ids))[:, None]
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        hidden, cache = self.decoder(embedded, of_rows, mask, cache, use_cache)
        if self.output is not None:
            logits = self.output(hidden)
        else:
            logits = functional.linear(hidden * self.config.d_model**-0.5, self.shared.weight)
        loss = None if labels is None else exact_loss("tokens", self.config, logits, labels, num_items_in_batch)
        states: Any = encoded.last_hidden_state
        output = Seq2SeqLMOutput(loss=loss, logits=logits, cache=cache, encoder_last_hidden_state=states)
        return output.to_tuple() if return_dict is False else output

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_outputs: object = None,
        antigen_index: Tensor | None = None,
        layout: VarlenLayout | None = None,
        **kwargs: object,
    ) -> Any:
        """Generates antibodies by transformers' `generate`: ids from `<bos>` on, (rows * num_return_sequences, tokens).

        Takes a batch of the collator's as it is. Each antigen is encoded once, for all rows, beams and samples that it
        has.

        Raises:
            ArgumentError: as `forward`.
        """
        kwargs.pop("labels", None)
        encoded = self.encode(inputs if input_ids is None else input_ids, attention_mask, encoder_outputs, layout)
        states: Any = encoded.last_hidden_state
        if attention_mask is None:
            attention_mask = states.new_ones(states.shape[:2], dtype=torch.long)
        num_rows = len(states) if antigen_index is None else len(antigen_index)
        encoded, mask = _of_rows(encoded, attention_mask, antigen_index, num_rows)
        return super().generate(None, *args, **kwargs, encoder_outputs=encoded, attention_mask=mask)


def _of_rows(
    encoded: EncoderStates, mask: Tensor | None, index: Tensor | None, num_rows: int
) -> tuple[EncoderStates, Tensor | None]:
    """Returns states and masks by row, from those of k antigens; `ArgumentError` where no index says which is whose."""
    if index is not None:
        encoded = EncoderStates(**{name: value.index_select(0, index) for name, value in encoded.items()})
        mask = None if mask is None else mask.index_select(0, index)
    states: Any = encoded.last_hidden_state
    if len(states) != num_rows:
        raise ArgumentError(f"{len(states)} antigens for {num_rows} rows: say in antigen_index which row has which.")
    return encoded, mask
