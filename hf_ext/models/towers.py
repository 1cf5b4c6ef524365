"""Encoders in towers: loaded when needed, released when not, saved by reference unless they train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import join_windows
from ..errors import ArgumentError
from .configuration import AffinityConfig, EncoderSpec, TowerSpec
from .encoders import build_encoder, cut_layers, load_encoder, set_trainable
from .head import POOLINGS, Pooling
from .kernels.process_settings import computing_in_float32, replaced
from .lora import is_rounded, merge_layers, quantize

Encode = Callable[[Sequence[str]], Tensor]


class TowerModel(PreTrainedModel):
    """A model on encoders in towers, as its configuration names them.

    Frozen encoders are referenced, not owned: they are loaded from their id when first needed (`attach_encoders`), can
    be released (`release_encoders`) while a head trains on cached embeddings, and are saved by id, revision and weight
    hash unless `config.save_full`. Encoders that train (LoRA, full) are ordinary submodules.
    """

    def __init__(self, config: AffinityConfig):
        super().__init__(config)
        self.encoders = nn.ModuleDict()
        for index, spec in enumerate(config.encoder_specs):
            if config.save_full or spec.training != "frozen":
                self.encoders[str(index)] = build_encoder(spec)
        self.poolings = nn.ModuleDict()
        for index, tower in enumerate(config.tower_specs):
            self.poolings[str(index)] = self._make_pooling(tower)
        self._encoder_transforms: list[Callable[[nn.Module], Any]] = []
        self.vectors: Any = None  # in place of an encoder, see `set_vectors`

    @property
    def embedding_sizes(self) -> dict[str, int]:
        """Input name -> width of its pooled embedding, or of a residue's."""
        specs = self.config.encoder_specs
        sizes = [int(spec.config.get("hidden_size") or spec.config["d_model"]) for spec in specs]
        widths = [1 if spec.masked_head else size * (1 + len(spec.also)) for size, spec in zip(sizes, specs)]
        return {name: widths[tower.encoder] for tower in self.config.tower_specs for name in tower.names}

    @property
    def frozen_inputs(self) -> list[str]:
        """Names of inputs whose embeddings never change while this model trains."""
        is_frozen = [spec.training == "frozen" for spec in self.config.encoder_specs]
        return [name for tower in self.config.tower_specs if is_frozen[tower.encoder] for name in tower.names]

    @property
    def encoder_dtype(self) -> torch.dtype:
        """What frozen encoders' weights are stored in."""
        return getattr(torch, self.config.encoder_dtype)

    @property
    def encoder_autocast(self) -> torch.dtype | None:
        """What frozen encoders' products are computed in, if not in their weights' dtype."""
        return getattr(torch, self.config.encoder_autocast) if self.config.encoder_autocast else None

    def tower_of(self, name: str) -> TowerSpec:
        """Returns the tower that encodes input `name`.

        Raises:
            ArgumentError: the model has no such input.
        """
        for tower in self.config.tower_specs:
            if name in tower.names:
                return tower
        raise ArgumentError(f"No input {name!r}; this model reads {[*self.embedding_sizes]}.")

    def pooling_of(self, name: str) -> Any:
        """Returns what makes one vector of the token states of input `name`."""
        return self.poolings[str(self.config.tower_specs.index(self.tower_of(name)))]

    def _make_pooling(self, tower: TowerSpec) -> Pooling:
        name = tower.names[0]
        pooling = POOLINGS[tower.pooling](self.embedding_sizes[name])
        if name in self.frozen_inputs and [*pooling.parameters()]:
            raise ArgumentError(
                f"pooling={tower.pooling!r} has weights, which would never train: embeddings of a frozen encoder are "
                "pooled once. Train the encoder (--tower_training lora or full), or give --pooling mean."
            )
        return pooling

    def set_vectors(self, vectors: Any) -> None:
        """Sets the `VectorFile` that is read in place of an encoder; raises ArgumentError if it has another width."""
        (spec,) = self.config.encoders
        width = spec["config"]["hidden_size"]
        if vectors.width != width:
            raise ArgumentError(
                f"--embeddings {vectors.path}: vectors of {vectors.width}, and the model reads {width}."
            )
        self.config.encoders = [{**spec, "fingerprint": vectors.fingerprint}]
        self.vectors = vectors

    def attach_encoders(self) -> None:
        """Loads referenced encoders that are not in memory. Cost: one load from disk or the Hub cache each."""
        if self.vectors is not None:
            raise ArgumentError(
                "--embeddings are read through embedding_cache: name it in --speedups, not in --without."
            )
        for index, spec in enumerate(self.config.encoder_specs):
            if str(index) not in self.encoders:
                encoder: Any = load_encoder(spec, self.encoder_dtype, self.config.encoder_bits, self.device)
                encoder = encoder.to(self.device).eval()
                for transform in self._encoder_transforms:
                    transform(encoder)
                self.encoders[str(index)] = encoder
        self._list_references()

    def transform_encoders(self, transform: Callable[[nn.Module], Any]) -> None:
        """Applies an in-place change, such as another kernel, to encoders in memory and to those loaded later."""
        self._encoder_transforms.append(transform)
        for encoder in self.encoders.values():
            transform(encoder)

    def forget_transform(self, transform: Callable[[nn.Module], Any]) -> None:
        """Leaves encoders that are loaded from now on as they are; those in memory stay changed."""
        self._encoder_transforms.remove(transform)

    def release_encoders(self) -> None:
        """Lets go of frozen, referenced encoders: no memory, no entry in the state dict, no work for DDP."""
        for index, spec in enumerate(self.config.encoder_specs):
            if spec.training == "frozen" and not self.config.save_full and str(index) in self.encoders:
                del self.encoders[str(index)]
        self._list_references()

    def read_layer(self, index: int, layer: int) -> None:
        """Sets which layer of encoder `index` gives its states, from 1; drops the layers above."""
        self.config.encoders[index] = {**self.config.encoders[index], "layer": layer}
        if str(index) in self.encoders:
            encoder: Any = self.encoders[str(index)]
            cut_layers(encoder, layer)
        self._describe_encoders()

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Does what transformers does.

        Where no encoder trains there are no activations to recompute, and nothing is done.
        """
        if any(spec.training != "frozen" for spec in self.config.encoder_specs):
            super().activation_checkpointing_enable(*args, **kwargs)
            # Reentrant checkpointing asks the inputs of a block whether to record it, and frozen embeddings say no.
            self.enable_input_require_grads()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode as torch does, but keeps frozen encoders in evaluation mode: dropout would add noise."""
        super().train(mode)
        for index, spec in enumerate(self.config.encoder_specs):
            if spec.training == "frozen" and str(index) in self.encoders:
                self.encoders[str(index)].eval()
        return self

    def encode(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        """Encodes one input: pooled embeddings.

        Where residues have labels, the states of all of them, one after another.

        Args:
            name: input name, such as `heavy` or `heavy+light`.
            batch: `ResidueTokenizer`'s tensors, (n, tokens), or windows of proteins, which are put together first.

        Returns:
            (rows or residues, width), float32.
        """
        tower = self.tower_of(name)
        if str(tower.encoder) not in self.encoders:
            self.attach_encoders()
        encoder = self.encoders[str(tower.encoder)]
        frozen = self.config.encoder_specs[tower.encoder].training == "frozen"
        tokens = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in batch}
        # Frozen encoders ignore Trainer's autocast, so that live and cached embeddings agree; the others follow it.
        own = torch.autocast(tokens["input_ids"].device.type, self.encoder_autocast, self.encoder_autocast is not None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen), own if frozen else nullcontext():
            states, masks = join_windows(encoder(**tokens).last_hidden_state, batch)
        if self.config.kind.per_residue:
            return states[masks["residue_mask"]].float()
        return self.pooling_of(name)(states, masks)

    def quantize_bases(self) -> int:
        """Stores what is beside adapters in 4 bits, see `models.lora.quantize`; returns the bytes that this saves."""
        self.config.base_bits = 4
        specs = self.config.encoder_specs
        saved = sum(quantize(one) for name, one in self.encoders.items() if specs[int(name)].training == "lora")
        self._list_references()
        return saved

    def merge_adapters(self) -> int:
        """Adds LoRA adapters into the weights beside them, in place; returns how many.

        The towers are ordinary ones afterwards that train in full, so that their weights are saved with the model and
        are never taken for those of the encoder they came from. Predictions are the same up to rounding. A base in half
        precision is read again first; one in 4 bits is merged as its codes are, which the adapters were trained beside.

        Raises:
            ArgumentError: no tower has adapters.
        """
        adapted = [i for i, spec in enumerate(self.config.encoder_specs) if spec.training == "lora"]
        if not adapted:
            raise ArgumentError("No tower of this model has adapters to merge; it was not trained with LoRA.")
        num_layers = 0
        for index in adapted:
            encoder: Any = self.encoders[str(index)]
            if is_rounded(encoder) and not self.config.base_bits:  # never add to what was rounded
                encoder = self._in_float32(index)
            num_layers += merge_layers(encoder)
            set_trainable(encoder, "full")
            self.config.encoders[index] = {**self.config.encoders[index], "training": "full", "lora": {}}
        self.config.base_bits = None
        self._describe_encoders()
        return num_layers

    def save_pretrained(self, save_directory: Any, *, state_dict: dict | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Saves as transformers does, but leaves out referenced encoder weights; names are those of the modules.

        transformers 5.24 writes ESM's LayerNorms as gamma/beta, which `Trainer`'s raw `load_state_dict` then drops
        (https://github.com/huggingface/transformers/issues/43701); `save_original_format=False` keeps our names. Remove
        when a resumed ESM keeps its LayerNorms without it.
        """
        kwargs["save_original_format"] = False
        self._list_references()  # codes have entries that floats had not
        super().save_pretrained(save_directory, state_dict=state_dict, **kwargs)

    def _is_referenced(self, key: str) -> bool:
        """Returns whether a state-dict entry belongs to encoder weights that are stored by reference."""
        if self.config.save_full or not key.startswith("encoders."):
            return False
        training = self.config.encoder_specs[int(key.split(".")[1])].training
        return training == "frozen" or (training == "lora" and "lora_" not in key)

    def _list_references(self) -> None:
        """Tells transformers which entries `save_pretrained` leaves out and `Trainer` need not find in a checkpoint."""
        self._keys_to_ignore_on_save = {key for key in self.state_dict() if self._is_referenced(key)}

    def _describe_encoders(self) -> None:
        """Tells `from_pretrained` what a file holds; `post_init` looks only at direct children, not in `encoders`."""
        model: Any = self  # post_init has made sets of these attributes
        encoder: Any
        for name, encoder in self.encoders.items():
            model._no_split_modules.update(encoder._no_split_modules)
            if self._is_referenced(f"encoders.{name}."):
                model._keys_to_ignore_on_load_missing.add(rf"^encoders\.{name}\.(?!.*lora_)")
            else:  # T5 saves its tied embedding once
                tied = encoder.all_tied_weights_keys
                model.all_tied_weights_keys.update({f"encoders.{name}.{k}": f"encoders.{name}.{tied[k]}" for k in tied})
        self._list_references()

    def _in_float32(self, index: int) -> PreTrainedModel:
        """Puts a LoRA encoder whose base was read again, in float32, in the place of one whose base was rounded."""
        rounded = self.encoders[str(index)]
        encoder: Any = build_encoder(self.config.encoder_specs[index])
        encoder.load_state_dict({k: v for k, v in rounded.state_dict().items() if "lora_" in k}, strict=False)
        self._load_base_weights(index, encoder)
        self.encoders[str(index)] = encoder.to(self.device).train(rounded.training)
        return encoder

    def _load_base_weights(self, index: int, encoder: Any) -> None:
        """Fills a LoRA encoder with the weights of the one that its spec names."""
        spec = self.config.encoder_specs[index]
        source = load_encoder(EncoderSpec(**{**asdict(spec), "training": "full", "lora": {}}))
        names = encoder.state_dict().keys()
        weights = {name if name in names else _inside_lora(name): v for name, v in source.state_dict().items()}
        missing, unexpected = encoder.load_state_dict(weights, strict=False)
        lost = [name for name in missing if "lora_" not in name]
        if lost or unexpected:
            raise ArgumentError(f"Encoder {spec.name_or_path!r}: weights missing {lost}, unexpected {unexpected}.")


def in_float32(model: TowerModel, name: str, encode: Encode) -> Encode | None:
    """Returns `encode`, which runs the encoder of input `name`, in float32.

    None where that is what it computes in already.
    """
    in_half = model.encoder_autocast is not None or model.encoder_dtype != torch.float32
    if not in_half or name not in model.frozen_inputs:
        return None

    def exactly(sequences: Sequence[str]) -> Tensor:
        model.attach_encoders()
        encoder = model.encoders[str(model.tower_of(name).encoder)]
        with replaced(model.config, encoder_autocast=None), computing_in_float32(encoder):
            return encode(sequences)

    return exactly


def _inside_lora(name: str) -> str:
    """Renames `x.query.weight` as PEFT does when it wraps the layer: `x.query.base_layer.weight`."""
    module, leaf = name.rsplit(".", 1)
    return f"{module}.base_layer.{leaf}"
