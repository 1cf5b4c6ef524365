"""What a run of this task would read, hold and compute, before it starts."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..baselines import PRETRAINED_ROWS
from ..data import DataArguments, make_demo_encoders
from ..evaluation import RowMetrics
from ..hardware import Hardware
from ..labels import LabelKind, Number
from ..memory import affinity_batch
from ..models import AffinityModel, build_config, build_encoder
from ..plan import Plan
from ..speedups import lora_settings
from ..tasks import MakeBatch, Part, RowLengths, Sketch, Stage, read_lengths, sketch_encoder
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .building import (
    build_collator,
    fill_in_demo,
    model_settings,
    read_towers,
    settle_encoders,
    settle_residue_steps,
    settle_training,
)
from .measure import check_measure, describe_measure, settle_measure
from .rows import describe_rows, load_rows
from .scoring import read_requirements

EMBEDDING_BYTES = 4  # of a number on disk, of a sequence's embedding
STATE_BYTES = 2  # of a residue's


def sketch_run(
    given: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, hardware: Hardware
) -> Sketch:
    """Reads rows and configurations as the recipe would; what fails becomes a problem, and the rest goes on without it.

    Args:
        given, data_args, args: as parsed; settled as the recipe does. Without `dataset_name` the demo's are filled in.

    Cost: reading the data, near copies between splits included; of Hub encoders their config.json.
    """
    sketch = Sketch(str(data_args.dataset_name), data_args.dataset_name is None, "--encoders")
    with tempfile.TemporaryDirectory() as scratch:
        table = None
        if data_args.dataset_name is None:
            sketch.subject = "generated rows and two small untrained encoders"
            table = fill_in_demo(given, data_args, make_demo_encoders(Path(scratch) / "demo_encoders"))
        sketch.notes += filter(None, [settle_encoders(given, args, hardware)])
        loaded = sketch.attempt("data", lambda: _load(sketch, given, data_args, args, scratch, table))
        splits, kind = (loaded.splits, loaded.kind) if loaded else ({}, Number())
        model = sketch.attempt("model", lambda: _build(given, data_args, args, kind))
        sketch.attempt("measure", lambda: _read_measure(sketch, given, data_args, args, kind, splits.get("validation")))
        if model is None:
            return sketch
        args = sketch.settle_stock(given, args)
        inputs = model.config.input_columns
        collate = partial(build_collator, model, data_args, given.max_length)
        limits = sketch.find_limits(given.encoders, inputs, splits, data_args, collate, given.max_length)
        lengths = read_lengths(splits, inputs, limits)
        sketch.stages.append(
            Stage(
                args,
                model,
                [_sketch_part(model, index, lengths) for index in range(len(model.config.encoder_specs))],
                partial(_as_trained, model, lengths.longest),
                lengths,
                rows=splits.get("train"),
                inputs=SimpleNamespace(columns=inputs),
                num_head_parameters=sum(parameter.numel() for parameter in model.head.parameters()),
            )
        )
    sketch.check_stream(lengths, args)
    return sketch


def _build(
    given: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, kind: LabelKind
) -> AffinityModel:
    given.tower_training, args.use_peft = settle_training(given, args.use_peft)
    specs, towers = read_towers(given, data_args.sequence_columns, lora_settings(args))
    with torch.device("meta"):
        return AffinityModel(build_config(specs, towers, **model_settings(given, kind)))


def _load(
    sketch: Sketch,
    given: AffinityArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    scratch: str,
    table: Any,
) -> Any:
    if not sketch.is_read(data_args.dataset_name):
        return None
    loaded = load_rows(given, data_args, output_dir=scratch, seed=args.seed, table=table)
    num_rows = None if data_args.streaming else len(loaded.splits["train"])
    sketch.notes += filter(None, [settle_residue_steps(args, loaded.kind, num_rows)])
    sketch.report = loaded.report
    sketch.describe = partial(describe_rows, loaded)
    return loaded


def _read_measure(
    sketch: Sketch,
    given: AffinityArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    kind: LabelKind,
    validation: Any,
) -> None:
    settle_measure(args, given.loss, kind)
    metrics = RowMetrics(given.binder_threshold, data_args.group_column, kind)
    check_measure(args, given.loss, metrics, validation)
    read_requirements(given, data_args, kind)
    sketch.measure = describe_measure(args, given.loss, metrics)


def _sketch_part(model: AffinityModel, index: int, lengths: RowLengths) -> Part:
    spec = model.config.encoder_specs[index]
    names = [name for tower in model.config.tower_specs if tower.encoder == index for name in tower.names]
    with torch.device("meta"):
        encoder = build_encoder(spec)
    part = sketch_encoder(encoder, spec.training, spec.name_or_path, lengths, names)
    num_bytes = part.num_distinct * part.width * EMBEDDING_BYTES
    if model.config.kind.per_residue:
        num_bytes = round(part.num_distinct * lengths.mean[names[0]] * part.width * STATE_BYTES)
    test = lengths.num_rows.get("test", 0)
    fitted = zip(("train", "validation"), PRETRAINED_ROWS)
    known = test + sum(min(lengths.num_rows.get(split, 0), most) for split, most in fitted)
    scored = 0 if spec.training == "frozen" else len(names) * (test + known)
    return replace(part, stored_bytes=num_bytes, num_scored=scored)


def _as_trained(model: AffinityModel, longest: Mapping[str, int], plan: Plan) -> tuple[AffinityModel, MakeBatch]:
    """Makes the model as it trains, with the frozen encoders that then run.

    The others' embeddings are read from the cache.

    Where residues have labels, those of the cache are taken for so many rows with a label each; of an encoder that
    runs while it trains, the head is counted once per row.
    """
    made = copy.deepcopy(model)
    is_cached = plan.applied("embedding_cache")
    kind = model.config.kind
    kind = kind.of_rows
    made.config.label_kind = kind.stored
    for index, spec in enumerate(made.config.encoder_specs):
        if str(index) not in made.encoders and not is_cached:
            with torch.device("meta"):
                encoder: Any = build_encoder(spec)
            in_half = plan["encoder_precision"].settings.get("mode") == "weights"
            made.encoders[str(index)] = encoder.to(torch.bfloat16) if in_half else encoder
    made._list_references()
    live = {name: num for name, num in longest.items() if not is_cached or name not in made.frozen_inputs}
    embedded = {name: width for name, width in made.embedding_sizes.items() if name not in live}
    labels = 1 if live or not model.config.kind.per_residue else max(longest.values())
    return made, lambda rows: affinity_batch(live, embedded, rows * labels, kind)
