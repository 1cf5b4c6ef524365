"""What a run of this task would read, hold and compute, before it starts."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..baselines import PRETRAINED_ROWS
from ..data import DataArguments, Fold, NumberColumns, SequenceCollator, make_demo_encoders
from ..evaluation import RowMetrics
from ..hardware import Hardware
from ..heads import resolve_likelihood, set_wild_type
from ..labels import LabelKind, Number
from ..memory import affinity_batch
from ..models import LIKELIHOOD, VECTORS, AffinityModel, build_config, build_encoder
from ..plan import Plan
from ..speedups import lora_settings
from ..tasks import DryRun, MakeBatch, Part, RowLengths, Stage, Step, dry_run_encoder, read_lengths
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .building import (
    build_collator,
    fill_in_demo,
    model_settings,
    read_towers,
    resolve_encoders,
    resolve_residue_steps,
    resolve_training,
)
from .distilling import check_teacher
from .measure import check_measure, describe_measure, resolve_measure
from .repeats import check as check_repeats
from .repeats import find_folds_of
from .rows import bind_vectors, describe_rows, load_rows
from .scoring import read_requirements

EMBEDDING_BYTES = 4  # of a number on disk, of a sequence's embedding
STATE_BYTES = 2  # of a residue's
TIMED_ROWS = 4096


def make_dry_run(
    given: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, hardware: Hardware
) -> DryRun:
    """Reads rows and configurations as the recipe would; what fails becomes a problem, and the rest goes on without it.

    Args:
        given, data_args, args: as parsed; resolved as the recipe does. Without `dataset_name` the demo's are filled in.

    Cost: reading the data, near copies between splits included; of Hub encoders their config.json.
    """
    dry_run = DryRun(str(data_args.dataset_name), data_args.dataset_name is None, "--encoders")
    with tempfile.TemporaryDirectory() as scratch:
        table = None
        if data_args.dataset_name is None:
            dry_run.subject = "generated rows and two small untrained encoders"
            table = fill_in_demo(given, data_args, make_demo_encoders(Path(scratch) / "demo_encoders"))
        dry_run.notes += filter(None, [resolve_encoders(given, args, hardware)])
        splits = {}
        kind: LabelKind = Number()
        numbers = NumberColumns()
        num_runs = given.num_seeds
        wild_type = ""

        def load() -> None:
            nonlocal splits, kind, numbers, num_runs, wild_type
            if not dry_run.is_read(data_args.dataset_name):
                return
            resolve_likelihood(given, args, data_args)
            check_repeats(given, data_args, args)
            if given.folds:
                folds, *_ = find_folds_of(given.folds, data_args, Path(scratch) / "rejected.csv")
                data_args.fold = Fold(given.folds, folds[0])
                num_runs *= len(folds) + (given.final_model == "all")
            loaded = load_rows(given, data_args, output_dir=scratch, seed=args.seed, table=table)
            splits = loaded.splits
            kind = loaded.kind
            numbers = loaded.numbers
            wild_type = loaded.report.get("variants", {}).get("wild_type", "")
            num_rows = None if data_args.streaming else len(splits["train"])
            dry_run.notes += filter(None, [resolve_residue_steps(args, kind, num_rows, given.trains_encoders)])
            loaded.report["warnings"] += check_teacher(given, data_args, loaded)
            dry_run.report = loaded.report
            dry_run.describe = partial(describe_rows, loaded)

        def build() -> AffinityModel:
            given.tower_training, args.use_peft = resolve_training(given, args.use_peft)
            specs, towers = read_towers(given, data_args.sequence_columns, lora_settings(args))
            with torch.device("meta"):
                return AffinityModel(build_config(specs, towers, **model_settings(given, kind, numbers.state())))

        def read_measure() -> None:
            resolve_measure(args, given.measured_loss, kind)
            metrics = RowMetrics(given.binder_threshold, data_args.group_column, kind)
            check_measure(args, given.loss, metrics, splits.get("validation"))
            read_requirements(given, data_args, kind)
            dry_run.measure = describe_measure(args, given.loss, metrics)

        dry_run.attempt("data", load)
        model = dry_run.attempt("model", build)
        dry_run.attempt("measure", read_measure)
        if model is None:
            return dry_run
        args = dry_run.resolve_stock(given, args)
        inputs = model.config.input_columns
        if splits:
            dry_run.attempt("vectors", lambda: bind_vectors(model, given.embeddings, splits, data_args))

        def collate() -> SequenceCollator:
            collator = build_collator(model, data_args, given.max_length)
            if given.objective == LIKELIHOOD:
                set_wild_type(model, collator, wild_type)
            return collator

        limits = dry_run.find_limits(given.encoders, inputs, splits, data_args, collate, given.max_length)
        lengths = read_lengths(splits, inputs, limits)
        if given.objective == LIKELIHOOD:  # a step is one pass of the wild type
            model.config.wild_type = [0] * max(lengths.longest.values())
            mean = {name: one / args.per_device_train_batch_size for name, one in lengths.mean.items()}
            lengths = replace(lengths, mean=mean)
        dry_run.stages.append(
            Stage(
                args,
                model,
                [_dry_run_part(model, index, lengths) for index in range(len(model.config.encoder_specs))],
                partial(_as_trained, model, lengths),
                lengths,
                rows=splits.get("train"),
                inputs=SimpleNamespace(columns=inputs),
                num_head_parameters=sum(parameter.numel() for parameter in model.head.parameters()),
                num_runs=num_runs,
            )
        )
    dry_run.check_stream(lengths, args)
    return dry_run


def _dry_run_part(model: AffinityModel, index: int, lengths: RowLengths) -> Part:
    spec = model.config.encoder_specs[index]
    names = [name for tower in model.config.tower_specs if tower.encoder == index for name in tower.names]
    if model.config.reads_vectors:
        width = model.embedding_sizes[names[0]]
        layer = partial(_make_layer, width)
        distinct = sum(lengths.num_distinct[name] for name in names)
        part = Part(VECTORS, "frozen", width, 0, 2.0 * width**2, layer, len(names), distinct)
    else:
        with torch.device("meta"):
            encoder = build_encoder(spec)
        part = dry_run_encoder(encoder, spec.training, spec.name_or_path, lengths, names)
    num_bytes = part.num_distinct * part.width * EMBEDDING_BYTES
    if model.config.kind.per_residue:
        tokens = lengths.mean[names[0]] * lengths.windows[names[0]]
        num_bytes = round(part.num_distinct * tokens * part.width * STATE_BYTES)
    test = lengths.num_rows.get("test", 0)
    fitted = zip(("train", "validation"), PRETRAINED_ROWS)
    known = test + sum(min(lengths.num_rows.get(split, 0), most) for split, most in fitted)
    scored = 0 if spec.training == "frozen" else len(names) * (test + known)
    return replace(part, stored_bytes=num_bytes, num_scored=scored)


def _make_layer(width: int, device: str, num: int) -> Step | None:
    """Makes what is timed where there is no encoder: a layer as wide as the vectors, on some of them."""
    if num > TIMED_ROWS:
        return None
    return Step(torch.nn.Linear(width, width).to(device), {"input": torch.zeros(num, width, device=device)})


def _as_trained(model: AffinityModel, lengths: RowLengths, plan: Plan) -> tuple[AffinityModel, MakeBatch]:
    """Makes the model as it trains, with the frozen encoders that then run.

    The others' embeddings are read from the cache.

    Where residues have labels, those of the cache are taken for so many rows with a label each; of an encoder that
    runs while it trains, the head is counted once per row.
    """
    made = copy.deepcopy(model)
    is_cached = plan.applied("embedding_cache")
    kind = model.config.kind.of_rows
    made.config.label_kind = kind.stored
    for index, spec in enumerate(made.config.encoder_specs):
        if str(index) not in made.encoders and not is_cached:
            with torch.device("meta"):
                encoder: Any = build_encoder(spec)
            in_half = plan["encoder_precision"].settings.get("mode") == "weights"
            made.encoders[str(index)] = encoder.to(torch.bfloat16) if in_half else encoder
    made._list_references()
    longest = lengths.longest
    live = {name: num for name, num in longest.items() if not is_cached or name not in made.frozen_inputs}
    embedded = {name: width for name, width in made.input_sizes.items() if name not in live}
    labels = 1 if live or not model.config.kind.per_residue else max(longest.values())
    return made, lambda rows: affinity_batch(live, embedded, rows * labels, kind, lengths.most_windows)
