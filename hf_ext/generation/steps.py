"""The steps of a stage that trains a generator; see `hf_ext.tasks.Task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import TrainOutput

from ..arguments import check_metric_name
from ..errors import ArgumentError
from ..masked_lm import EVALUATION_METRICS, compute_metrics, sum_rows
from ..models import AntibodyGenerator
from ..processes import fsdp_version
from ..reporting import summarize_data
from ..tasks import Run
from ..trainer import FastTrainer
from .building import Inputs, build_inputs, build_model, fill_in_demo
from .judging.discriminator import Discriminator
from .judging.measuring import EpochSamples, measure
from .preparing import PairData, load_pairs, resolve_columns
from .stages import describe_stage, resolve_stage


@dataclass
class StageData:
    """Rows of a stage, how they become tokens for the model, and who judges what it writes."""

    pairs: PairData
    discriminator: Discriminator | None
    model: AntibodyGenerator
    inputs: Inputs


def check(run: Run) -> None:
    """Implements `Task.check`."""
    check_metric_name(run.args.metric_for_best_model, EVALUATION_METRICS)
    if fsdp_version(run.args) or run.args.deepspeed_plugin is not None:
        raise ArgumentError(
            "FSDP or DeepSpeed: one process writes the antibodies that are judged, so each needs the whole model. "
            "Launch plain processes, as accelerate_configs/ddp.yaml does."
        )


def load(run: Run) -> StageData:
    """Gives the arguments what the stage says, and builds the model too: it decides how antigens are tokenized."""
    model_args = run.model_args
    data_args = run.data_args
    args = run.args
    changed = resolve_stage(run.stage, model_args, data_args, args, run.explicit)
    run.log.info(describe_stage(run.stage, changed))
    table = None
    if data_args.dataset_name is None:
        run.log.info("No --dataset_name: generated demo data, in which CDR-H3 follows the antigen by a planted rule.")
        table = fill_in_demo(model_args, args, run.explicit)
    resolve_columns(model_args, data_args, run.explicit)
    name = model_args.discriminator
    discriminator = None
    if name:  # before anything is trained
        discriminator = Discriminator.from_pretrained(name)
    pairs = load_pairs(model_args, data_args, run.explicit, output_dir=args.output_dir, seed=args.seed, table=table)
    model = build_model(model_args, args, pairs)
    antigens: list[str] = []
    for split in pairs.splits:
        antigens += pairs.antibodies(split).antigens
    return StageData(pairs, discriminator, model, build_inputs(model, args, antigens))


def build(run: Run, data: StageData) -> dict[str, Any]:
    """Implements `Task.build`; evaluations keep three sums per row, not scores of every token."""
    pairs = data.pairs
    inputs = data.inputs
    tokens = {name: inputs.tokenize(pairs.antibodies(name), pairs.affinities(name)) for name in pairs.splits}
    run.test_dataset = tokens["test"]
    run.log.info(summarize_data(pairs.report))
    return {
        "model": data.model,
        "data_collator": inputs.collator,
        "train_dataset": tokens["train"],
        "eval_dataset": tokens["validation"],
        "processing_class": inputs.encoder.tokenizer,  # of antibodies
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": sum_rows,
        "callbacks": [EpochSamples(run.folder, run.model_args, pairs, inputs, run.args.seed)],
    }


def score(run: Run, trainer: FastTrainer, trained: TrainOutput, data: StageData) -> dict[str, Any]:
    """Writes antibodies for test antigens, judges them, and holds the stage against its gates."""
    facts, text = measure(trainer, run.stage, run.model_args, data.pairs, data.inputs, data.discriminator)
    run.log.info("\nStage %d, on test antigens:\n%s\n", run.stage, text)
    run.is_last = run.is_last or not facts["gates_passed"]
    return facts
