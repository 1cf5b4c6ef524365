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
from ..tasks import DryRun, MakeBatch, Stage, dry_run_encoder, read_lengths, with_adapters
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


def make_dry_run(
    given: MaskedLMArguments, data_args: DataArguments, args: FastTrainingArguments, hardware: Hardware
) -> DryRun:
    """Reads rows and configuration as the recipe would; what fails becomes a problem, and the rest goes on without it.

    Args:
        given, data_args, args: as parsed. Without `dataset_name` the demo's are filled in.

    Cost: reading the data, near copies between splits included; of a model on the Hub its config.json.
    """
    dry_run = DryRun(str(data_args.dataset_name), data_args.dataset_name is None, "--model_name_or_path")
    table = None
    if data_args.dataset_name is None:
        dry_run.subject = "generated sequences"
        table = make_demo_sequences()
        fill_in_demo(given)
    model = dry_run.attempt("model", lambda: _build(given))
    with tempfile.TemporaryDirectory() as scratch:
        splits = dry_run.attempt("data", lambda: _load(dry_run, data_args, args, scratch, table)) or {}
    dry_run.attempt("measure", lambda: check_metric_name(args.metric_for_best_model, EVALUATION_METRICS))
    dry_run.attempt("measure", lambda: parse_requirements(given.require, SCORES))
    if model is None:
        return dry_run
    columns = list(data_args.sequence_columns)
    inputs = {input_name(columns): columns}
    name = given.model_name_or_path
    limits = dry_run.find_limits(
        [name],
        inputs,
        splits,
        data_args,
        lambda: build_collator(build_tokenizer(given), model, given, data_args, args.seed),
    )
    lengths = read_lengths(splits, inputs, limits)
    dry_run.check_stream(lengths, args)
    args = dry_run.resolve_stock(given, args)
    part = dry_run_encoder(model, "lora" if args.use_peft else "full", name, lengths, [*inputs])
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
    dry_run.stages.append(stage)
    return dry_run


def _build(given: MaskedLMArguments) -> PreTrainedModel:
    if given.model_name_or_path is None:
        with torch.device("meta"):
            return build_model(given)
    config = read_config(given)
    with reading_model(given), torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    freeze_contact_head(model)
    return model


def _load(dry_run: DryRun, data_args: DataArguments, args: FastTrainingArguments, scratch: str, table: Any) -> Any:
    if not dry_run.is_read(data_args.dataset_name):
        return None
    loaded = load_data(data_args, output_dir=scratch, seed=args.seed, needs_labels=False, table=table)
    dry_run.report = loaded.report
    dry_run.describe = partial(summarize_data, loaded.report)
    return loaded.splits


def _as_trained(model: PreTrainedModel, args: FastTrainingArguments, longest: int, plan: Plan) -> tuple[Any, MakeBatch]:
    batch = partial(masked_lm_batch, longest, plan.applied("masked_lm_head"))
    return with_adapters(model, args, plan), batch
