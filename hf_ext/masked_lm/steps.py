"""The steps of a run that trains a masked language model; see `hf_ext.tasks.Task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments.checks import check_metric_name
from ..data.loading import LoadedData, load_data
from ..data.masking import MaskedLMCollator
from ..data.tokenization import check_inputs
from ..errors import ArgumentError
from ..evaluation.requirements import check_requirements, parse_requirements
from ..models.lora import require_base
from ..reporting.data_section import summarize_data
from ..tasks.running import Run, with_absolute_path
from .building import build_collator, build_model, build_tokenizer, fill_in_demo, make_demo_sequences, prepare_splits
from .results import (
    EVALUATION_METRICS,
    SCORES,
    UnigramBaseline,
    compute_metrics,
    format_scores,
    score_splits,
    sum_rows,
)

DEMO_LEARNING_RATE = 2e-3  # small models take larger steps


@dataclass
class MaskedLMData:
    """Rows, and what the length of a row depends on.

    Attributes:
        model, collator: with the limits that rows were read by.
        loaded: the splits as read, and what loading reports.
        splits: the same as Trainer takes them.
    """

    model: Any
    collator: MaskedLMCollator
    loaded: LoadedData
    splits: dict[str, Any]


def check(run: Run) -> None:
    """See `Task.check`."""
    check_metric_name(run.args.metric_for_best_model, EVALUATION_METRICS)
    parse_requirements(run.model_args.require, SCORES)
    if run.args.use_peft:
        require_base(run.model_args.model_name_or_path)


def load(run: Run) -> MaskedLMData:
    """Builds model and collator too: how long a row may be is the model's to say."""
    model_args, data_args, args = run.model_args, run.data_args, run.args
    table = None
    if data_args.dataset_name is None:
        run.log.info("No --dataset_name: generated demo data.")
        table = make_demo_sequences()
        if fill_in_demo(model_args):
            run.log.info("No model or --model_size either: a new ESM-2 with 2 layers, 64 wide.")
            if "learning_rate" not in run.explicit:
                args.learning_rate = DEMO_LEARNING_RATE
    model = build_model(model_args, for_lora=args.use_peft)
    collator: Any = build_collator(build_tokenizer(model_args), model, model_args, data_args, args.seed)
    loaded = load_data(data_args, output_dir=args.output_dir, seed=args.seed, needs_labels=False, table=table)
    loaded.report["inputs"] = check_inputs(collator, loaded.splits, data_args.dataset_name)
    run.log.info(summarize_data(loaded.report))
    splits = prepare_splits(loaded.splits, args, collator.columns, model_args.stock_trainer)
    if model_args.require and not {"validation", "test"} & {*splits}:
        raise ArgumentError("--require: there are no validation or test rows to score the model on.")
    return MaskedLMData(model, collator, loaded, splits)


def build(run: Run, data: MaskedLMData) -> dict[str, Any]:
    """See `Task.build`; evaluations keep three sums per row, not scores of every token."""
    return {
        "model": data.model,
        "data_collator": data.collator,
        "train_dataset": data.splits["train"],
        "eval_dataset": data.splits.get("validation"),
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": sum_rows,
    }


def score(run: Run, trainer: Any, trained: Any, data: MaskedLMData) -> dict[str, Any]:
    """Scores validation and test beside the frequencies of residues in training."""
    scores = score_splits(trainer, data.splits, UnigramBaseline.fit(data.loaded.splits["train"], data.collator))
    final = scores.get("test", scores.get("validation", {})).get("model", {})
    required = check_requirements(parse_requirements(run.model_args.require, SCORES), final)
    run.log.info("\nOver all masked residues; unigram: training frequencies alone:\n%s", format_scores(scores))
    return {"data": with_absolute_path(data.loaded.report, "source"), **scores, "requirements": required}
