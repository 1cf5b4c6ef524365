"""AffinityModel: one to three encoder towers and a head; predicts numbers or classes, of rows or of residues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import ModelOutput

from ..data import NUMBERS, NumberColumns
from ..errors import ArgumentError
from ..labels import UNKNOWN
from .configuration import AffinityConfig, EncoderSpec, TowerSpec, build_config
from .encoders import load_encoder, set_trainable
from .head import LIKELIHOOD, RegressionHead, score_variants
from .losses import LOSSES, NumberLoss
from .mixed.ensemble import HeadEnsemble
from .towers import TowerModel

PREDICTING = ("head.", "ensemble.", "poolings.")  # names of weights that no encoder brings along


@dataclass
class AffinityOutput(ModelOutput):
    """`loss`: scalar, of the head, standardised label units. `logits`, float32; of an ensemble, if there is one:

    - regression: (n,), label units; of k values (n, k).
    - classification, multilabel: (n, classes), divided by `config.temperature`; probabilities by softmax or sigmoid.
    - of residues: (n, longest, classes), or (n, longest) in label units; -100 (`UNKNOWN`) behind a row's end.

    `std`: (n,), label units, how far a measured value is expected from `logits`; of mixed heads of numbers. Trainer
    leaves it out, unless `ignore_keys=[]`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    std: Tensor | None = None


class AffinityModel(TowerModel):
    """Predicts what `config.label_kind` says from the pooled embeddings of a row's sequences, or from each residue's.

    Its encoders are those of a `TowerModel`: frozen ones are referenced, not owned. Of the form "likelihood" it ranks
    variants of `config.wild_type`: its one encoder is a masked language model, whose score stands for an embedding.

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
        widths = [*self.input_sizes.values()]
        form = config.head_form or "mlp"
        kind = config.kind
        (num_outputs,) = kind.output_shape or (None,)
        self.head = RegressionHead(widths, list(config.head_sizes or []), config.head_dropout, form, num_outputs)
        self.ensemble = None if config.ensemble is None else HeadEnsemble(widths, **config.ensemble)
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
        lacking, foreign = (
            sorted(key for key in facts[keys] if key.startswith(PREDICTING))
            for keys in ("missing_keys", "unexpected_keys")
        )
        if (lacking or foreign) and not kwargs.get("ignore_mismatched_sizes"):
            raise ArgumentError(
                f"config.json describes another head than the weights are of (missing {lacking}, not asked for "
                f"{foreign}): take both from the same folder."
            )
        for name, encoder in model.encoders.items():
            training = model.config.encoder_specs[int(name)].training
            if training == "lora" and not model.config.save_full:
                model._load_base_weights(int(name), encoder)
            set_trainable(encoder, training)  # weights that the file lacks came back trainable
        if model.config.base_bits:
            model.quantize_bases()
        return (model, facts) if wants_facts else model

    @property
    def input_sizes(self) -> dict[str, int]:
        """Input name -> width of what the head reads of it: of embeddings, then of columns beside sequences."""
        width = len(NumberColumns.from_state(self.config.numbers))
        return {**self.embedding_sizes, **({NUMBERS: width} if width else {})}

    @property
    def skips_unknown(self) -> bool:
        """Whether labels of -100 count nothing; of one number per row they are numbers like others."""
        return self.config.kind.skips_unknown

    def fill_of(self, name: str) -> Tensor:
        """Returns what stands for the embedding of input `name` in rows that lack it: (width,), float32."""
        widths = self.input_sizes
        return dict(zip(widths, self.head.fill.split([*widths.values()])))[name]

    def encode(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        """Encodes as `TowerModel` does; of the form "likelihood" `score_variants`, (rows, 1)."""
        if self.config.head_form == LIKELIHOOD:
            return score_variants(self.encoders["0"], self.config.wild_type, batch)
        return super().encode(name, batch)

    def forward(
        self,
        sequences: dict[str, dict[str, Tensor]] | None = None,
        embeddings: dict[str, Tensor] | None = None,
        labels: Tensor | None = None,
        bounds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool = True,
        missing: dict[str, Tensor] | None = None,
        teacher: Tensor | None = None,
        numbers: Tensor | None = None,
        residues: Tensor | None = None,
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
            teacher: logits of a teacher, of the shape of this model's own. The loss is then `config.distill_weight`
                times the distance from them, of every row, and 1 less it times the loss of labels, of rows whose label
                is known: not NaN, nor -100 where that means not known. Every label counts, known or not.
            numbers: (n, width), what `NumberColumns` makes of columns beside sequences.
            residues: (n, width), what the collator reads off sequences for an ensemble with members that need it.

        Raises:
            ArgumentError: an input is given neither way, `residues` are needed, or `missing` names one that the model
                does not read.
        """
        pooled = dict(embeddings or {})
        absent = dict(missing or {})
        per_residue = self.config.kind.per_residue
        if numbers is not None:
            pooled[NUMBERS] = numbers
        for name, batch in (sequences or {}).items():
            pooled[name] = self.encode(name, batch)
            if per_residue:
                lengths = batch["residue_mask"].sum(1, keepdim=True)
                absent[name] = torch.arange(int(lengths.max()), device=lengths.device) >= lengths
            elif "place" in batch:
                absent[name] = batch["place"] < 0
                pooled[name] = pooled[name].index_select(0, batch["place"].clamp(min=0))
        given = pooled.keys() & absent.keys() if per_residue else pooled.keys()
        lacking = [name for name in self.input_sizes if name not in given]
        if lacking:
            what = "embeddings with `missing`" if per_residue else "embeddings"
            raise ArgumentError(f"No sequences or {what} for {lacking}; this model reads {[*self.input_sizes]}.")
        features = torch.cat([pooled[name].float() for name in self.input_sizes], dim=1)
        (ends,) = absent.values() if per_residue else (None,)
        filled = self._mark(absent, features) if absent and ends is None else None
        output = self.head(features, filled)
        loss = None
        if labels is not None:
            known = labels if ends is None else labels[:, : ends.shape[1]][~ends]
            total = self._label_losses(output, known, bounds, teacher).sum()
            counted = labels.ne(UNKNOWN) if self.skips_unknown and teacher is None else torch.ones_like(labels)
            num_items = counted.sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(num_items, device=total.device).clamp(min=1)
        logits = self.to_logits(output)
        std = None
        if self.ensemble is not None:
            logits, apart = self.ensemble.mix(self.head.standardize(features, filled), residues)
            if spread := self.config.prediction_spread:
                std = (spread["noise"] + spread["slope"] * apart).sqrt()
        if ends is not None:
            padded = logits.new_full((*ends.shape, *logits.shape[1:]), UNKNOWN)
            padded[~ends] = logits
            logits = padded
        return AffinityOutput(loss=loss, logits=logits, std=std)

    def to_logits(self, output: Tensor) -> Tensor:
        """Maps what the head puts out to `forward`'s logits, where no ensemble predicts."""
        return self._loss.to_logits(output)

    def _mark(self, absent: dict[str, Tensor], features: Tensor) -> Tensor:
        """Marks features, (n, sum of widths), of inputs that their rows lack: of that shape, bool."""
        if unknown := sorted(absent.keys() - self.embedding_sizes.keys()):
            raise ArgumentError(f"missing names {unknown}; this model reads {[*self.embedding_sizes]}.")
        present = features.new_zeros(features.shape[0], dtype=torch.bool)  # len() is a constant in exports
        blocks = [absent.get(name, present)[:, None].expand(-1, w) for name, w in self.input_sizes.items()]
        return torch.cat(blocks, dim=1)

    def set_ensemble(self, ensemble: HeadEnsemble | None) -> None:
        """Sets the ensemble that predicts from here on, from the standardised embeddings; None: the head's own.

        The loss stays that of the head. Intervals and the spread of the predictions before are dropped.
        """
        self.config.ensemble = None if ensemble is None else ensemble.shapes()
        self.config.prediction_intervals = None
        self.config.prediction_spread = None
        self.ensemble = None if ensemble is None else ensemble.to(self.device).eval()

    @torch.no_grad()
    def fit_scaling(
        self, label_mean: float | list[float], label_std: float | list[float], embeddings: dict[str, Tensor]
    ) -> None:
        """Stores the scale of labels (label units) and of each input's embeddings, (n, width) per input name.

        Embeddings of frozen encoders are divided by the standard deviation of each feature. Where the encoder trains
        they are divided by their typical size instead: variants of one protein vary so little that dividing by that
        would turn the smallest change of the encoder into a large one. So are columns beside sequences, which are
        standardised, or 0 and 1: a rare category is no large number. Rows that lack an input do not count in its scale.
        Likelihoods keep theirs.
        """
        self.config.is_scaled = True
        if self.config.head_form == LIKELIHOOD:
            return
        self.config.label_mean = label_mean
        if isinstance(label_std, list):
            self.config.label_std = [std if std > 0 else 1.0 for std in label_std]
        else:
            self.config.label_std = label_std if label_std > 0 else 1.0
        blocks = {name: embeddings[name].float() for name in self.input_sizes}
        scales = [
            block.std(0, unbiased=False)
            if name in self.frozen_inputs
            else block.square().mean().sqrt().expand(block.shape[1])
            for name, block in blocks.items()
        ]
        self.head.fit_scaling(torch.cat([block.mean(0) for block in blocks.values()]), torch.cat(scales))

    def row_losses(self, logits: Tensor, labels: Tensor, bounds: Tensor | None = None) -> Tensor | None:
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

    def _label_losses(self, output: Tensor, labels: Tensor, bounds: Any, teacher: Tensor | None = None) -> Tensor:
        """Computes the loss of each label, of the shape of `labels`; 0 where it is not known, but for a teacher's."""
        if teacher is None:
            losses = self._loss.of_labels(output, labels, bounds)
            return losses.masked_fill(labels.eq(UNKNOWN), 0) if self.skips_unknown else losses
        unknown = labels.eq(UNKNOWN) if self.skips_unknown else labels.isnan()
        # Computed without NaN, whose gradient is NaN even where the loss is filled.
        losses = self._loss.of_labels(output, labels.nan_to_num(), bounds).masked_fill(unknown, 0)
        return torch.lerp(losses, self._teacher_losses(output, labels, teacher), self.config.distill_weight)

    def _teacher_losses(self, output: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """Computes how far outputs are from a teacher's, of the shape of `labels`.

        Of numbers squared, standardised. Of classes the divergence of softened probabilities times temperature squared,
        so that gradients are as large whatever the temperature (G. Hinton et al., arXiv:1503.02531).
        """
        taught = self._loss.to_output(teacher)
        if output.shape == labels.shape:
            return functional.mse_loss(output, taught, reduction="none")
        heat = self.config.distill_temperature
        ours, theirs = (functional.log_softmax(one / heat, -1) for one in (output, taught))
        return heat**2 * functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
