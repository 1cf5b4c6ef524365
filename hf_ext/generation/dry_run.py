"""What each stage of a run would read, hold and compute, before it starts."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from ..arguments import check_metric_name
from ..data import DataArguments
from ..errors import DataError
from ..hardware import Hardware
from ..masked_lm import EVALUATION_METRICS
from ..models import AntibodyGenerator, EncoderSpec, GeneratorConfig, build_encoder
from ..reporting import summarize_data
from ..tasks import DryRun, Part, RowLengths, Stage, Step, dry_run_encoder, read_lengths
from ..training_args import FastTrainingArguments
from .arguments import GeneratorArguments
from .building import build_config, fill_in_demo
from .preparing import load_pairs, resolve_columns
from .stages import STAGES, check_auto, resolve_stage

STATE_BYTES = 4  # of a number of a frozen encoder's states, on disk
RESIDUE = 5  # an id in the generator's vocabulary and in that of ESM


@dataclass
class Rows:
    """Lengths of antigens and of pairs; of the training rows tokens of both, (n,), and affinities where there are."""

    lengths: RowLengths
    tokens: np.ndarray
    affinities: np.ndarray | None = None

    def take(self, given: GeneratorArguments, most: int | None) -> np.ndarray:
        """Counts tokens of the rows that a stage trains on: of as many as its filter and its limit leave."""
        tokens = self.tokens
        if given.min_affinity is not None and self.affinities is not None:
            tokens = tokens[self.affinities > given.min_affinity]
        if len(tokens) < min(2, len(self.tokens)):
            raise DataError(
                f"--min_affinity {given.min_affinity:g} leaves {len(tokens)} of {len(self.tokens):,} training rows: "
                "give a smaller one, or check --label_column."
            )
        return tokens[:most]


def make_dry_run(
    given: GeneratorArguments, data_args: DataArguments, args: FastTrainingArguments, hardware: Hardware
) -> DryRun:
    """Describes all three stages, whichever `--stage` names; what fails becomes a problem.

    Args:
        given, data_args, args: as parsed; `data_args` is resolved, as the recipe does.

    Cost: reading the data as the run would, once.
    """
    dry_run = DryRun(str(data_args.dataset_name), data_args.dataset_name is None)
    dry_run.encoder_flag = "--antigen_encoder" if given.architecture == "esm" else ""
    dry_run.attempt("arguments", lambda: check_metric_name(args.metric_for_best_model, EVALUATION_METRICS))
    if given.stage == "auto":
        dry_run.attempt("arguments", lambda: check_auto(args))
    num_problems = len(dry_run.problems)
    dry_run.attempt("arguments", lambda: resolve_columns(given, data_args, args.explicit_fields))
    if len(dry_run.problems) > num_problems:
        return dry_run
    table = None
    if data_args.dataset_name is None:
        dry_run.subject = "generated pairs"
        table = fill_in_demo(given, args, frozenset(args.explicit_fields))
    if not dry_run.is_read(data_args.dataset_name):
        return dry_run
    rows = dry_run.attempt("data", lambda: _load(dry_run, given, data_args, args, table))
    for number in STAGES if rows else ():
        stage = dry_run.attempt("model", partial(_dry_run_stage, number, rows, given, data_args, args))
        dry_run.stages += [stage] if stage else []
    return dry_run


def _load(
    dry_run: DryRun, given: GeneratorArguments, data_args: DataArguments, args: FastTrainingArguments, table: Any
) -> Rows:
    """Loads all rows, so that the limits and the filter of each stage can be taken from them."""
    given = copy.copy(given)
    data_args = copy.copy(data_args)
    given.min_affinity = given.max_validation_samples = data_args.max_train_samples = None
    with tempfile.TemporaryDirectory() as scratch:
        data = load_pairs(given, data_args, args.explicit_fields, output_dir=scratch, seed=args.seed, table=table)
    dry_run.report = data.report
    dry_run.describe = partial(summarize_data, data.report)
    splits = {}
    for name in data.splits:
        rows = data.antibodies(name)
        pairs = [heavy + (light or "") for heavy, light in zip(rows.heavy, rows.light)]
        splits[name] = Dataset.from_dict({"antigen": [*rows.antigens], "pair": pairs})
    lengths = read_lengths(splits, {name: [name] for name in ("antigen", "pair")}, {})
    tokens = [len(row["antigen"]) + len(row["pair"]) + 4 for row in splits["train"]]
    affinities = data.affinities("train")
    known = None if affinities is None else np.array(affinities, np.float64)
    return Rows(lengths, np.array(tokens, np.int64), known)


def _dry_run_stage(
    number: int, rows: Rows, given: GeneratorArguments, data_args: DataArguments, args: FastTrainingArguments
) -> Stage:
    stages = given.stages
    explicit = args.explicit_fields
    lengths = rows.lengths
    given = copy.copy(given)
    data_args = copy.copy(data_args)
    args = copy.copy(args)
    resolve_stage(number, given, data_args, args, explicit)
    tokens = rows.take(given, data_args.max_train_samples)
    with torch.device("meta"):
        model: Any = AntibodyGenerator(build_config(given, args))
    batch = partial(make_batch, model)
    mean = [lengths.mean["antigen"], lengths.mean["pair"]]
    longest = [lengths.longest["antigen"], lengths.longest["pair"]]
    parts = _dry_run_encoder(model, lengths)
    is_encoder_kept = bool(parts) and parts[0].training == "frozen"
    generator = Part(
        f"a generator ({given.size})",
        "full",
        model.config.d_model,
        model.num_parameters(),
        count_flops(model, *mean),
        partial(_make_step, model.config, batch, mean, args.per_device_train_batch_size),
        download_bytes=sum(part.download_bytes for part in parts) if not is_encoder_kept else 0,
    )
    num_validation = min(lengths.num_rows["validation"], given.max_validation_samples or len(rows.tokens))
    return Stage(
        args,
        model,
        [generator, *(parts if is_encoder_kept else [])],
        lambda plan: (copy.deepcopy(model), partial(batch, *longest)),
        replace(lengths, num_rows={"train": len(tokens), "validation": num_validation}),
        rows=Dataset.from_dict({args.length_column_name: tokens}),
        title=f"{number} {given.size}",
        is_asked=number in stages,
    )


def count_flops(model: Any, antigen: float, pair: float) -> float:
    """Counts FLOPs of a row, forward: 2 for each weight and token that it reads (encoder) or writes (decoder).

    Left out are products of attention, up to a sixth, and that rows of one batch share an antigen.
    """
    config = model.config
    weights = [_num_weights(model.encoder), _num_weights(model.decoder)]
    if config.architecture == "light":  # the weights of one layer, applied several times
        weights = [weights[0] * config.num_encoder_layers, weights[1] * config.num_decoder_layers]
    return 2.0 * (weights[0] * antigen + weights[1] * pair)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)


def make_batch(model: Any, antigen: int, pair: int, rows: int, device: str = "meta") -> dict[str, Any]:
    """Makes rows of so many tokens; of a frozen encoder its states, which the run reads from a cache."""
    ids = torch.full((rows, antigen), RESIDUE, device=device)
    batch: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full((rows, pair), RESIDUE, device=device),
    }
    if model.config.architecture == "esm" and model.encoder.spec.training == "frozen":
        return {**batch, "encoder_outputs": torch.ones(rows, antigen, model.encoder.width, device=device)}
    return {**batch, "input_ids": ids}


def _make_step(
    config: GeneratorConfig, batch: Any, mean: list[float], most: int, device: str, rows: int
) -> Step | None:
    if rows > most:
        return None
    model = AntibodyGenerator(config).train().to(device)
    return Step(model, batch(*map(round, mean), rows, device))


def _dry_run_encoder(model: AntibodyGenerator, lengths: RowLengths) -> list[Part]:
    """Describes a pretrained encoder of antigens, and what it reads once where it is frozen; nothing without one."""
    if model.config.antigen_encoder is None:
        return []
    spec = EncoderSpec(**model.config.antigen_encoder)
    with torch.device("meta"):
        encoder = build_encoder(spec)
    part = dry_run_encoder(encoder, spec.training, spec.name_or_path, lengths, ["antigen"])
    stored = round(part.num_distinct * lengths.mean["antigen"]) * part.width * STATE_BYTES
    return [replace(part, dtype="fp32", stored_bytes=stored, is_read_while_training=False)]
