"""What each stage of a run would read, hold and compute, before it starts."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from ..arguments.checks import check_metric_name
from ..data.arguments import DataArguments
from ..data.splits import draw_rows
from ..errors import DataError
from ..hardware import Hardware
from ..masked_lm.results import EVALUATION_METRICS
from ..models.configuration import EncoderSpec
from ..models.encoders import build_encoder
from ..models.generation.configuration import GeneratorConfig
from ..models.generation.model import AntibodyGenerator
from ..plan import Plan
from ..tasks.sketch import SPECIAL_TOKENS, MakeBatch, Part, Sketch, Span, Stage, Step, sketch_encoder
from .arguments import GeneratorArguments
from .building import build_config
from .preparing import load_pairs, settle_columns
from .stages import STAGES, check_auto, settle_stage

# Without data: as many rows as a large set with measured affinities has; antigens as in the 18,507 pairs that MAGE was
# trained on (github.com/IGlab-VUMC/MAGE_ab_generation): 1,336 of them, of 470 residues on average.
ASSUMED_ROWS = {"train": 127_000, "validation": 16_000}
ASSUMED_RESIDUES, ROWS_PER_ANTIGEN = (470, 230), 14  # of antigen and of pair
STATE_BYTES = 4  # of a number of a frozen encoder's states, on disk
# One time step of one LSTM layer on a GPU, forward and backward: kernels that wait for each other. Assumed.
LSTM_STEP_SECONDS = (1e-5, 5e-5)
READERS = r"project|^keys|(cross_attention|EncDecAttention)\.[kv]\."  # of a decoder, what multiplies antigen tokens
FIRST_TOKENS = 8  # of each sequence, in the first step that is timed
RESIDUES = (4, 24)  # their ids, in the generator's vocabulary and in that of ESM
REMEDIES = {
    "data": "--dataset_name, --antigen_column, --heavy_column, --light_column, --label_column as the file has them",
    "model": "--architecture, --size; --antigen_encoder: a Hub id or a folder, without a network HF_HUB_OFFLINE=1",
}


@dataclass(frozen=True)
class PairLengths:
    """n rows and the k distinct antigens that they have, as numbers of tokens: what decides how much is computed.

    Attributes:
        antigen_index: (n,), int64, which antigen each row has.
        antigen_tokens: (k,), int64.
        pair_tokens: (n,), int64.
        affinities: (n,), float64; None where there are none.
    """

    antigen_index: np.ndarray
    antigen_tokens: np.ndarray
    pair_tokens: np.ndarray
    affinities: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pair_tokens)

    @classmethod
    def of_sequences(
        cls,
        antigens: Sequence[str],
        heavy: Sequence[str],
        light: Sequence[str | None],
        affinities: Sequence[float] | None = None,
    ) -> PairLengths:
        """Of rows of sequences."""
        number = {antigen: i for i, antigen in enumerate(dict.fromkeys(antigens))}
        return cls(
            np.array([number[antigen] for antigen in antigens], np.int64),
            np.array([len(antigen) + SPECIAL_TOKENS for antigen in number], np.int64),
            np.array([len(a) + len(b or "") + SPECIAL_TOKENS for a, b in zip(heavy, light)], np.int64),
            None if affinities is None else np.array(affinities, np.float64),
        )

    @classmethod
    def assumed(cls, num_rows: int, antigen: int, pair: int, rows_per_antigen: int) -> PairLengths:
        """Rows that are alike: residues of antigen and of pair, and how many rows have one antigen."""
        index = np.arange(num_rows) // rows_per_antigen
        lengths = np.full(int(index[-1]) + 1, antigen + SPECIAL_TOKENS, np.int64)
        return cls(index, lengths, np.full(num_rows, pair + SPECIAL_TOKENS, np.int64))

    @property
    def row_antigens(self) -> np.ndarray:
        """(n,), int64, tokens of each row's antigen."""
        return self.antigen_tokens[self.antigen_index]

    def above(self, threshold: float | None) -> PairLengths:
        """Rows with a larger affinity; all, where there is no threshold or no affinity."""
        if threshold is None or self.affinities is None:
            return self
        return self.take(np.flatnonzero(self.affinities > threshold))

    def limited(self, num_rows: int | None, seed: int) -> PairLengths:
        """As many rows at random as a run takes with that seed; all, where there is no limit."""
        if num_rows is None or num_rows >= len(self):
            return self
        return self.take(draw_rows(len(self), seed, num_rows))

    def take(self, rows: np.ndarray) -> PairLengths:
        """Some of the rows, with the antigens that they have."""
        antigens, index = np.unique(self.antigen_index[rows], return_inverse=True)
        affinities = None if self.affinities is None else self.affinities[rows]
        return PairLengths(index.astype(np.int64), self.antigen_tokens[antigens], self.pair_tokens[rows], affinities)

    def encoded_in_batch(self, num_rows: int) -> float:
        """Tokens that are encoded in a random batch, where each antigen stands once; expected.

        A batch without any of an antigen's c of n rows: product over i < num_rows of (n - c - i) / (n - i).
        """
        counts = np.bincount(self.antigen_index, minlength=len(self.antigen_tokens))
        missing = np.ones(len(counts))
        for i in range(min(num_rows, len(self))):
            missing *= np.clip(len(self) - counts - i, 0, None) / (len(self) - i)
        return float((1 - missing) @ self.antigen_tokens)


Rows = Mapping[str, PairLengths]


def count_pair_flops(model: Any, rows: PairLengths, batch_rows: float, is_training: bool) -> float:
    """FLOPs of all rows once, in random batches of so many, in each of which an antigen is encoded once.

    2 for a weight and a token forward, 4 more in training. Left out are products of attention, up to a sixth, and a
    frozen encoder that is not the model's own, whose states are cached.

    Args:
        model: `AntibodyGenerator`; on torch's meta device will do.
        is_training: forward and backward, no optimizer; else forward alone, as in an evaluation.
    """
    config, decoder = model.config, model.decoder
    size = max(1, min(round(batch_rows), len(rows)))
    # Of the light Transformer the weights of one layer, applied several times.
    times = (config.num_encoder_layers, config.num_decoder_layers) if config.architecture == "light" else (1, 1)
    encoded = rows.encoded_in_batch(size) * len(rows) / size * times[0] * _num_weights(model.encoder)
    read = rows.row_antigens.sum() * _num_weights(decoder, READERS)
    output = config.vocab_size * (config.d_model if model.output is None else config.hidden_size)
    layers = times[1] * _num_weights(decoder, rf"^(?!.*(bridge|{READERS}))")
    return 2.0 * float(encoded + read + rows.pair_tokens.sum() * (layers + output)) * (3 if is_training else 1)


def _num_weights(module: nn.Module, names: str = "") -> int:
    return sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and re.search(names, name))


def sketch_run(given: GeneratorArguments, data_args: DataArguments, args: Any, hardware: Hardware) -> Sketch:
    """All three stages, whichever `--stage` names; what fails becomes a problem.

    Args:
        given, data_args, args: as parsed; `data_args` is settled, as the recipe does.

    Cost: reading the data as the run would, once.
    """
    sketch = Sketch(REMEDIES, str(data_args.dataset_name), data_args.dataset_name is None)
    sketch.encoder_flag = "--antigen_encoder" if given.architecture == "esm" else ""
    sketch.attempt("arguments", lambda: check_metric_name(args.metric_for_best_model, EVALUATION_METRICS))
    if given.stage == "auto":
        sketch.attempt("arguments", lambda: check_auto(args))
    num_problems = len(sketch.problems)
    sketch.attempt("arguments", lambda: settle_columns(given, data_args, args.explicit_fields))
    if len(sketch.problems) > num_problems:
        return sketch
    if data_args.dataset_name is None:
        sketch.subject = "assumed rows"
        sketch.notes.append("Without --dataset_name the recipe trains a small model on generated pairs, in a minute.")
    is_known = data_args.dataset_name is not None and sketch.is_read(data_args.dataset_name)
    rows = sketch.attempt("data", lambda: _load(sketch, given, data_args, args)) if is_known else _assume(sketch)
    for number in STAGES if rows else ():
        stage = sketch.attempt("model", partial(_sketch_stage, sketch, number, rows, given, data_args, args, is_known))
        sketch.stages += [stage] if stage else []
    return sketch


def _assume(sketch: Sketch) -> Rows:
    antigen, pair = ASSUMED_RESIDUES
    listed = ", ".join(f"{num:,} {name}" for name, num in ASSUMED_ROWS.items())
    sketch.notes.append(
        f"Stages are sized up for {listed} rows, assumed: antigens of {antigen} residues, {ROWS_PER_ANTIGEN} rows of "
        f"each, and antibodies of {pair}."
    )
    return {name: PairLengths.assumed(num, antigen, pair, ROWS_PER_ANTIGEN) for name, num in ASSUMED_ROWS.items()}


def _load(sketch: Sketch, given: GeneratorArguments, data_args: DataArguments, args: Any) -> Rows:
    """All rows, so that the limits and the filter of each stage can be taken from them."""
    given, data_args = copy.copy(given), copy.copy(data_args)
    given.min_affinity = given.max_validation_samples = data_args.max_train_samples = None
    with tempfile.TemporaryDirectory() as scratch:
        data = load_pairs(given, data_args, args.explicit_fields, output_dir=scratch, seed=args.seed)
    sketch.report = data.report
    found = {}
    for name in data.splits:
        rows = data.antibodies(name)
        found[name] = PairLengths.of_sequences(rows.antigens, rows.heavy, rows.light, data.affinities(name))
    return found


def _sketch_stage(
    sketch: Sketch, number: int, rows: Rows, given: GeneratorArguments, data_args: DataArguments, args: Any, known: bool
) -> Stage | None:
    """A stage with the rows that it would take; None: its filter leaves none, which is a problem."""
    stages, explicit = given.stages, args.explicit_fields
    given, data_args, args = copy.copy(given), copy.copy(data_args), copy.copy(args)
    settle_stage(number, given, data_args, args, explicit)
    train: PairLengths | None = sketch.attempt("data", lambda: _take(rows["train"], given, data_args, args.seed))
    if train is None:
        return None
    validation = rows["validation"].limited(given.max_validation_samples, args.seed)
    with torch.device("meta"):
        model: Any = AntibodyGenerator(build_config(given, args))
    tokens = train.pair_tokens + train.row_antigens
    batch_rows = args.per_device_train_batch_size * args.world_size
    if args.max_tokens_per_batch:
        batch_rows = max(1, args.max_tokens_per_batch * len(train) // int(tokens.sum())) * args.world_size
    eval_flops = count_pair_flops(model, validation, args.per_device_eval_batch_size, False) if len(validation) else 0.0
    encoder = _sketch_encoder(model, rows, known)
    part = Part(
        f"a generator ({given.size})",
        "full",
        model.config.d_model,
        sum(parameter.numel() for parameter in model.parameters()),
        make_step=partial(_make_step, model.config, min(batch_rows, len(train)), train),
        train_flops=count_pair_flops(model, train, batch_rows, is_training=True),
        eval_flops=eval_flops,
        download_bytes=0 if encoder is None or encoder.training == "frozen" else encoder.download_bytes,
    )
    return Stage(
        args,
        model,
        [part, *([encoder] if encoder is not None and encoder.training == "frozen" else [])],
        as_trained=partial(_as_trained, model, train),
        num_rows={"train": len(train), "validation": len(validation)},
        num_tokens=int(tokens.sum()),
        longest=int(train.row_antigens.max() + train.pair_tokens.max()),
        rows=Dataset.from_dict({args.length_column_name: tokens}),
        serial_seconds=_serial_seconds(model.config, train),
        title=f"{number} {given.size}",
        is_asked=number in stages,
    )


def _take(train: PairLengths, given: GeneratorArguments, data_args: DataArguments, seed: int) -> PairLengths:
    kept = train.above(given.min_affinity)
    if len(kept) < min(2, len(train)):
        raise DataError(
            f"--min_affinity {given.min_affinity:g} leaves {len(kept)} of {len(train):,} training rows: give a smaller "
            "one, or check --label_column."
        )
    return kept.limited(data_args.max_train_samples, seed)


def _sketch_encoder(model: AntibodyGenerator, rows: Rows, is_known: bool) -> Part | None:
    """A pretrained encoder of antigens, and all that it reads once where it is frozen; None: there is none."""
    if model.config.antigen_encoder is None:
        return None
    spec = EncoderSpec(**model.config.antigen_encoder)
    with torch.device("meta"):
        encoder = build_encoder(spec)
    distinct = [int(length) for each in rows.values() for length in each.antigen_tokens]
    part = sketch_encoder(encoder, spec.training, spec.name_or_path, {"distinct": distinct}, dtype="fp32")
    return replace(part, stored_bytes=sum(distinct) * part.width * STATE_BYTES if is_known else 0)


def _serial_seconds(config: GeneratorConfig, rows: PairLengths) -> Span:
    """Of an LSTM's time steps in one pass, from rows of middle length to the longest; 0 of others."""
    if config.architecture != "lstm":
        return 0.0, 0.0
    # Both directions of the encoder's layers, one after the other.
    layers = 2 * config.num_encoder_layers, config.num_decoder_layers
    least = layers[0] * float(rows.row_antigens.mean()) + layers[1] * float(rows.pair_tokens.mean())
    most = layers[0] * float(rows.row_antigens.max()) + layers[1] * float(rows.pair_tokens.max())
    return least * LSTM_STEP_SECONDS[0], most * LSTM_STEP_SECONDS[1]


def _as_trained(model: AntibodyGenerator, train: PairLengths, plan: Plan) -> tuple[Any, MakeBatch]:
    antigen, pair = int(train.row_antigens.max()), int(train.pair_tokens.max())

    def make(rows: int) -> dict[str, Any]:
        ids = torch.zeros(rows, antigen, dtype=torch.long, device="meta")
        batch: dict[str, Any] = {"labels": torch.zeros(rows, pair, dtype=torch.long, device="meta")}
        if _reads_states(model):
            states = torch.zeros(rows, antigen, model.encoder.width, device="meta")
            return {**batch, "attention_mask": ids, "encoder_outputs": states}
        return {**batch, "attention_mask": ids, "input_ids": ids}

    return copy.deepcopy(model), make


def _reads_states(model: Any) -> bool:
    """Whether antigens come as the states of a frozen encoder, which the run reads from a cache."""
    return model.config.architecture == "esm" and model.encoder.spec.training == "frozen"


def _make_step(config: GeneratorConfig, num_rows: int, rows: PairLengths, device: str, size: int) -> Step | None:
    """A training step without the optimizer, on random residues: rows of 8 tokens, 16, ..., their mean.

    It has all rows of a step: fewer would be slower by far for their FLOPs, an LSTM's products are too small then.
    """
    limit, typical = FIRST_TOKENS * size, int(max(rows.row_antigens.mean(), rows.pair_tokens.mean()))
    if size > 1 and limit // 2 >= typical:
        return None
    num_antigens = max(1, min(num_rows, round(rows.encoded_in_batch(num_rows) / rows.antigen_tokens.mean())))
    antigen, pair = (min(limit, int(mean)) for mean in (rows.row_antigens.mean(), rows.pair_tokens.mean()))
    index = np.arange(num_rows) % num_antigens
    alike = PairLengths(index, np.full(num_antigens, antigen), np.full(num_rows, pair))
    model: Any = AntibodyGenerator(config).train().to(device)
    batch = {
        "attention_mask": torch.ones(num_antigens, antigen, dtype=torch.long, device=device),
        "labels": torch.randint(*RESIDUES, (num_rows, pair), device=device),
        "antigen_index": torch.as_tensor(index, device=device),
    }
    if _reads_states(model):
        batch["encoder_outputs"] = torch.randn(num_antigens, antigen, model.encoder.width, device=device)
    else:
        batch["input_ids"] = torch.randint(*RESIDUES, (num_antigens, antigen), device=device)

    def run() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    flops = count_pair_flops(model, alike, num_rows, is_training=True)
    return Step(run, flops, f"{num_rows} rows of {pair} tokens, forward and backward")
