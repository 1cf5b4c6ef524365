"""What a run of this task would read, hold and compute, before it starts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from ..arguments import check_metric_name
from ..data import DataArguments, load_data
from ..evaluation import parse_requirements
from ..hardware import Hardware
from ..memory import masked_lm_batch
from ..models import input_name
from ..plan import Plan
from ..reporting import summarize_data
from ..tasks import MakeBatch, Sketch, Stage, read_lengths, sketch_encoder, with_adapters
from ..training_args import FastTrainingArguments
from .arguments import MaskedLMArguments
from .results import EVALUATION_METRICS, SCORES
from .steps import (
    build_collator,
    build_model,
    build_tokenizer,
    fill_in_demo,
    freeze_contact_head,
    make_demo_sequences,
    read_config,
    reading_model,
)


def sketch_run(
    given: MaskedLMArguments, data_args: DataArguments, args: FastTrainingArguments, hardware: Hardware
) -> Sketch:
    """Reads rows and configuration as the recipe would; what fails becomes a problem, and the rest goes on without it.

    Args:
        given, data_args, args: as parsed. Without `dataset_name` the demo's are filled in.

    Cost: reading the data, near copies between splits included; of a model on the Hub its config.json.
    """
    sketch = Sketch(str(data_args.dataset_name), data_args.dataset_name is None, "--model_name_or_path")
    table = None
    if data_args.dataset_name is None:
        sketch.subject = "generated sequences"
        table = make_demo_sequences()
        fill_in_demo(given)
    model = sketch.attempt("model", lambda: _build(given))
    with tempfile.TemporaryDirectory() as scratch:
        splits = sketch.attempt("data", lambda: _load(sketch, data_args, args, scratch, table)) or {}
    sketch.attempt("measure", lambda: check_metric_name(args.metric_for_best_model, EVALUATION_METRICS))
    sketch.attempt("measure", lambda: parse_requirements(given.require, SCORES))
    if model is None:
        return sketch
    columns = list(data_args.sequence_columns)
    inputs = {input_name(columns): columns}
    name = given.model_name_or_path
    limits = sketch.find_limits(
        [name],
        inputs,
        splits,
        data_args,
        lambda: build_collator(build_tokenizer(given), model, given, data_args, args.seed),
    )
    lengths = read_lengths(splits, inputs, limits)
    sketch.check_stream(lengths, args)
    args = sketch.settle_stock(given, args)
    part = sketch_encoder(model, "lora" if args.use_peft else "full", name, lengths, [*inputs])
    shown = name or given.model_size or "a new model"
    stage = Stage(
        args,
        model,
        [replace(part, name=shown, num_scored=lengths.num_rows.get("test", 0))],
        partial(_as_trained, model, args, sum(lengths.longest.values())),
        lengths,
        rows=splits.get("train"),
        inputs=SimpleNamespace(columns=inputs),
    )
    sketch.stages.append(stage)
    return sketch


def _build(given: MaskedLMArguments) -> PreTrainedModel:
    if given.model_name_or_path is None:
        with torch.device("meta"):
            return build_model(given)
    config = read_config(given)
    with reading_model(given), torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    freeze_contact_head(model)
    return model


def _load(sketch: Sketch, data_args: DataArguments, args: FastTrainingArguments, scratch: str, table: Any) -> Any:
    if not sketch.is_read(data_args.dataset_name):
        return None
    loaded = load_data(data_args, output_dir=scratch, seed=args.seed, needs_labels=False, table=table)
    sketch.report = loaded.report
    sketch.describe = partial(summarize_data, loaded.report)
    return loaded.splits


def _as_trained(model: PreTrainedModel, args: FastTrainingArguments, longest: int, plan: Plan) -> tuple[Any, MakeBatch]:
    batch = partial(masked_lm_batch, longest, plan.applied("masked_lm_head"))
    return with_adapters(model, args, plan), batch
