"""AffinityModel: one to three encoder towers and a head; predicts numbers or classes, of rows or of residues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import ArgumentError
from ..labels import UNKNOWN
from .configuration import AffinityConfig, EncoderSpec, TowerSpec, build_config
from .encoders import build_encoder, computing_in_float32, cut_layers, load_encoder, set_trainable
from .ensemble import HeadEnsemble
from .head import POOLINGS, Pooling, RegressionHead
from .kernels.process_settings import replaced
from .lora import is_rounded, merge_layers
from .losses import LOSSES, NumberLoss

Encode = Callable[[Sequence[str]], torch.Tensor]
PREDICTING = ("head.", "ensemble.", "poolings.")  # names of weights that no encoder brings along


@dataclass
class AffinityOutput(ModelOutput):
    """`loss`: scalar, of the head, standardised label units. `logits`, float32; of an ensemble, if there is one:

    - regression: (n,), label units; of k values (n, k).
    - classification, multilabel: (n, classes), divided by `config.temperature`; probabilities by softmax or sigmoid.
    - of residues: (n, longest, classes), or (n, longest) in label units; -100 (`UNKNOWN`) behind a row's end.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class AffinityModel(PreTrainedModel):
    """Predicts what `config.label_kind` says from the pooled embeddings of a row's sequences, or from each residue's.

    Frozen encoders are referenced, not owned: they are loaded from their id when first needed (`attach_encoders`), can
    be released (`release_encoders`) while a head trains on cached embeddings, and are saved by id, revision and weight
    hash unless `config.save_full`. Encoders that train (LoRA, full) are ordinary submodules.

    Raises:
        ArgumentError: a pooling with weights on a frozen encoder.
    """

    config_class = AffinityConfig
    base_model_prefix = "affinity"
    main_input_name = "labels"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: AffinityConfig):
        super().__init__(config)
        self.encoders = nn.ModuleDict()
        for index, spec in enumerate(config.encoder_specs):
            if config.save_full or spec.training != "frozen":
                self.encoders[str(index)] = build_encoder(spec)
        self.poolings = nn.ModuleDict()
        for index, tower in enumerate(config.tower_specs):
            self.poolings[str(index)] = self._make_pooling(tower)
        widths = [*self.embedding_sizes.values()]
        form = config.head_form or "mlp"
        kind = config.kind
        (num_outputs,) = kind.output_shape or (None,)
        self.head = RegressionHead(widths, list(config.head_sizes or []), config.head_dropout, form, num_outputs)
        self.ensemble = None if config.ensemble is None else HeadEnsemble(widths, **config.ensemble)
        self._encoder_transforms: list[Callable[[nn.Module], Any]] = []
        self.post_init()
        self._describe_encoders()

    @classmethod
    def from_encoders(cls, encoders: list[EncoderSpec], towers: list[TowerSpec], **settings: Any) -> AffinityModel:
        """Builds a new model on pretrained encoders, with an untrained head; `settings` go to `AffinityConfig`."""
        model = cls(build_config(encoders, towers, **settings))
        for name in model.encoders:
            # Adapters are made on the pretrained weights: DoRA's magnitudes are their norms, and the random
            # initialisation of a model built from its configuration would also fill LoRA's zero matrix.
            model.encoders[name] = load_encoder(model.config.encoder_specs[int(name)])
        model._list_references()
        return model.train()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads as transformers does; LoRA towers take their base weights from the encoder they name.

        Raises:
            ArgumentError: weights of the head or of its ensemble are missing, or are those of another form of head:
                transformers would fill them with random numbers and go on.
        """
        wants_facts = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, facts = loaded
        if not kwargs.get("ignore_mismatched_sizes"):
            _check_head(facts)
        for name, encoder in model.encoders.items():
            training = model.config.encoder_specs[int(name)].training
            if training == "lora" and not model.config.save_full:
                model._load_base_weights(int(name), encoder)
            set_trainable(encoder, training)  # weights that the file lacks came back trainable
        return (model, facts) if wants_facts else model

    @property
    def embedding_sizes(self) -> dict[str, int]:
        """Input name -> width of its pooled embedding, or of a residue's."""
        configs = [spec.config for spec in self.config.encoder_specs]
        widths = [int(config.get("hidden_size") or config["d_model"]) for config in configs]
        return {name: widths[tower.encoder] for tower in self.config.tower_specs for name in tower.names}

    @property
    def frozen_inputs(self) -> list[str]:
        """Names of inputs whose embeddings never change while this model trains."""
        is_frozen = [spec.training == "frozen" for spec in self.config.encoder_specs]
        return [name for tower in self.config.tower_specs if is_frozen[tower.encoder] for name in tower.names]

    @property
    def skips_unknown(self) -> bool:
        """Whether labels of -100 count nothing; of one number per row they are numbers like others."""
        return self.config.kind.skips_unknown

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

    def fill_of(self, name: str) -> torch.Tensor:
        """Returns what stands for the embedding of input `name` in rows that lack it: (width,), float32."""
        widths = self.embedding_sizes
        return dict(zip(widths, self.head.fill.split([*widths.values()])))[name]

    def attach_encoders(self) -> None:
        """Loads referenced encoders that are not in memory. Cost: one load from disk or the Hub cache each."""
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

    def train(self, mode: bool = True) -> AffinityModel:
        """Sets the mode as torch does, but keeps frozen encoders in evaluation mode: dropout would add noise."""
        super().train(mode)
        for index, spec in enumerate(self.config.encoder_specs):
            if spec.training == "frozen" and str(index) in self.encoders:
                self.encoders[str(index)].eval()
        return self

    def encode(self, name: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Encodes one input: pooled embeddings.

        Where residues have labels, the states of all of them, one after another.

        Args:
            name: input name, such as `heavy` or `heavy+light`.
            batch: `ResidueTokenizer`'s tensors, (n, tokens).

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
            states = encoder(**tokens).last_hidden_state
        if self.config.kind.per_residue:
            return states[batch["residue_mask"]].float()
        return self.pooling_of(name)(states, batch)

    def forward(
        self,
        sequences: dict[str, dict[str, torch.Tensor]] | None = None,
        embeddings: dict[str, torch.Tensor] | None = None,
        labels: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_dict: bool = True,
        missing: dict[str, torch.Tensor] | None = None,
    ) -> AffinityOutput:
        """Predicts from sequences, from cached embeddings, or from some of each.

        Args:
            sequences: input name -> `ResidueTokenizer`'s tensors; with `place`, (n,), which of them each row is, -1 for
                a row that lacks the input.
            embeddings: input name -> (n, width), float; of residues (residues of all rows, width).
            labels: one number (n,), k values or labels of a set (n, k), of residues (n, longest), float, label units;
                classes (n,) or (n, longest), int64. Everywhere but for one number per row -100 means not known.
            bounds: (n,), -1, 0, 1; see `regression_loss`.
            num_items_in_batch: known labels in the whole effective batch; the loss is the sum over them divided by it.
            missing: input name -> (n,), bool, true for rows that lack the input, whatever stands in its embedding. The
                head then sees the mean of the training rows that have it, which standardising makes 0. With embeddings
                of residues (n, longest), true behind a row's last one.

        Raises:
            ArgumentError: an input is given neither way, or `missing` names one that the model does not read.
        """
        pooled = dict(embeddings or {})
        absent = dict(missing or {})
        per_residue = self.config.kind.per_residue
        for name, batch in (sequences or {}).items():
            pooled[name] = self.encode(name, batch)
            if per_residue:
                lengths = batch["residue_mask"].sum(1, keepdim=True)
                absent[name] = torch.arange(int(lengths.max()), device=lengths.device) >= lengths
            elif "place" in batch:
                absent[name] = batch["place"] < 0
                pooled[name] = pooled[name].index_select(0, batch["place"].clamp(min=0))
        given = pooled.keys() & absent.keys() if per_residue else pooled.keys()
        lacking = [name for name in self.embedding_sizes if name not in given]
        if lacking:
            what = "embeddings with `missing`" if per_residue else "embeddings"
            raise ArgumentError(f"No sequences or {what} for {lacking}; this model reads {[*self.embedding_sizes]}.")
        features = torch.cat([pooled[name].float() for name in self.embedding_sizes], dim=1)
        (ends,) = absent.values() if per_residue else (None,)
        filled = self._mark(absent, features) if absent and ends is None else None
        output = self.head(features, filled)
        loss = None
        if labels is not None:
            known = labels if ends is None else labels[~ends]
            total = self._label_losses(output, known, bounds).sum()
            counted = labels.ne(UNKNOWN) if self.skips_unknown else torch.ones_like(labels)
            num_items = counted.sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(num_items, device=total.device).clamp(min=1)
        logits = self._loss.to_logits(output)
        if self.ensemble is not None:
            logits = self.ensemble(self.head.standardize(features, filled))
        if ends is not None:
            padded = logits.new_full((*ends.shape, *logits.shape[1:]), UNKNOWN)
            padded[~ends] = logits
            logits = padded
        return AffinityOutput(loss=loss, logits=logits)

    def _make_pooling(self, tower: TowerSpec) -> Pooling:
        name = tower.names[0]
        pooling = POOLINGS[tower.pooling](self.embedding_sizes[name])
        if name in self.frozen_inputs and [*pooling.parameters()]:
            raise ArgumentError(
                f"pooling={tower.pooling!r} has weights, which would never train: embeddings of a frozen encoder are "
                "pooled once. Train the encoder (--tower_training lora or full), or give --pooling mean."
            )
        return pooling

    def _mark(self, absent: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """Marks features, (n, sum of widths), of inputs that their rows lack: of that shape, bool."""
        if unknown := sorted(absent.keys() - self.embedding_sizes.keys()):
            raise ArgumentError(f"missing names {unknown}; this model reads {[*self.embedding_sizes]}.")
        present = features.new_zeros(len(features), dtype=torch.bool)
        blocks = [absent.get(name, present)[:, None].expand(-1, w) for name, w in self.embedding_sizes.items()]
        return torch.cat(blocks, dim=1)

    def set_ensemble(self, ensemble: HeadEnsemble | None) -> None:
        """Sets the ensemble that predicts from here on, from the standardised embeddings; None: the head's own.

        The loss stays that of the head. Intervals of the predictions before are dropped.
        """
        self.config.ensemble = None if ensemble is None else ensemble.shapes()
        self.config.prediction_intervals = None
        self.ensemble = None if ensemble is None else ensemble.to(self.device).eval()

    def merge_adapters(self) -> int:
        """Adds LoRA adapters into the weights beside them, in place; returns how many.

        The towers are ordinary ones afterwards that train in full, so that their weights are saved with the model and
        are never taken for those of the encoder they came from. Predictions are the same up to rounding. A base in half
        precision is read again first.

        Raises:
            ArgumentError: no tower has adapters.
        """
        adapted = [i for i, spec in enumerate(self.config.encoder_specs) if spec.training == "lora"]
        if not adapted:
            raise ArgumentError("No tower of this model has adapters to merge; it was not trained with LoRA.")
        num_layers = 0
        for index in adapted:
            encoder: Any = self.encoders[str(index)]
            if is_rounded(encoder):  # never add to what was rounded
                encoder = self._in_float32(index)
            num_layers += merge_layers(encoder)
            set_trainable(encoder, "full")
            self.config.encoders[index] = {**self.config.encoders[index], "training": "full", "lora": {}}
        self._describe_encoders()
        return num_layers

    @torch.no_grad()
    def fit_scaling(
        self, label_mean: float | list[float], label_std: float | list[float], embeddings: dict[str, torch.Tensor]
    ) -> None:
        """Stores the scale of labels (label units) and of each input's embeddings, (n, width) per input name.

        Embeddings of frozen encoders are divided by the spread of each feature. Where the encoder trains they are
        divided by their typical size instead: variants of one protein spread so little that dividing by it would turn
        the smallest change of the encoder into a large one. Rows that lack an input have no part in its scale.
        """
        self.config.label_mean = label_mean
        if isinstance(label_std, list):
            self.config.label_std = [std if std > 0 else 1.0 for std in label_std]
        else:
            self.config.label_std = label_std if label_std > 0 else 1.0
        blocks = {name: embeddings[name].float() for name in self.embedding_sizes}
        scales = [
            block.std(0, unbiased=False)
            if name in self.frozen_inputs
            else block.square().mean().sqrt().expand(block.shape[1])
            for name, block in blocks.items()
        ]
        self.head.fit_scaling(torch.cat([block.mean(0) for block in blocks.values()]), torch.cat(scales))
        self.config.is_scaled = True

    def row_losses(
        self, logits: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Sums the loss of each row, (n,), from `forward`'s logits and its arguments.

        None for "ranking", which needs pairs, and with an ensemble, whose logits are not what the loss is of.
        """
        if self.config.loss == "ranking" or self.ensemble is not None:
            return None
        output = self._loss.to_output(logits)
        return self._label_losses(output, labels, bounds).reshape(len(labels), -1).sum(1)

    @property
    def _loss(self) -> NumberLoss:
        return LOSSES[type(self.config.kind)](self.config)

    def _label_losses(self, output: torch.Tensor, labels: torch.Tensor, bounds: Any) -> torch.Tensor:
        """Computes the loss of each label, of the shape of `labels`; 0 where it is not known."""
        losses = self._loss.of_labels(output, labels, bounds)
        return losses.masked_fill(labels.eq(UNKNOWN), 0) if self.skips_unknown else losses

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


def in_float32(model: AffinityModel, name: str, encode: Encode) -> Encode | None:
    """Returns `encode`, which runs the encoder of input `name`, in float32.

    None where that is what it computes in already.
    """
    in_half = model.encoder_autocast is not None or model.encoder_dtype != torch.float32
    if not in_half or name not in model.frozen_inputs:
        return None

    def exactly(sequences: Sequence[str]) -> torch.Tensor:
        model.attach_encoders()
        encoder = model.encoders[str(model.tower_of(name).encoder)]
        with replaced(model.config, encoder_autocast=None), computing_in_float32(encoder):
            return encode(sequences)

    return exactly


def _inside_lora(name: str) -> str:
    """Renames `x.query.weight` as PEFT does when it wraps the layer: `x.query.base_layer.weight`."""
    module, leaf = name.rsplit(".", 1)
    return f"{module}.base_layer.{leaf}"


def _check_head(facts: dict[str, Any]) -> None:
    """Refuses what `from_pretrained` found where config.json describes another head than the weights are of."""
    lacking = sorted(key for key in facts["missing_keys"] if key.startswith(PREDICTING))
    foreign = sorted(key for key in facts["unexpected_keys"] if key.startswith(PREDICTING))
    if lacking or foreign:
        raise ArgumentError(
            f"config.json describes another head than the weights are of (missing {lacking}, not asked for {foreign}): "
            "take both from the same folder."
        )
