"""The steps of a run that trains an operator; see `hf_ext.tasks.Task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments.checks import check_metric_name
from ..evaluation.requirements import check_requirements, parse_requirements
from ..models.lora import require_base
from ..tasks.running import Run
from .building import Samples, build_collator, build_model, build_rows, build_terms, describe_samples, load_samples
from .data import OperatorRows
from .results import MODEL, ErrorMetrics, format_scores, score_names, score_splits


@dataclass
class OperatorData:
    """`samples`: split -> task -> arrays. `rows`: the same as Trainer takes them. `report`: for the record."""

    samples: Samples
    rows: dict[str, OperatorRows]
    report: dict[str, Any]


def check(run: Run) -> None:
    """See `Task.check`."""
    check_metric_name(run.args.metric_for_best_model, ErrorMetrics(run.model_args.tasks).row_metrics)
    if run.args.use_peft:
        require_base(None)
    parse_requirements(run.model_args.require, score_names(run.model_args.tasks))


def load(run: Run) -> OperatorData:
    """See `Task.load`."""
    samples = load_samples(run.model_args)
    report = describe_samples(samples, run.model_args)
    run.log.info("Data, %s: %s", report["source"], "; ".join(report["tasks"].values()))
    return OperatorData(samples, build_rows(samples), report)


def build(run: Run, data: OperatorData) -> dict[str, Any]:
    """See `Task.build`. The model gets the auxiliary terms of its loss."""
    model_args = run.model_args
    model = build_model(model_args, data.samples["train"])
    model.terms = terms = build_terms(model_args)
    metrics = ErrorMetrics(model_args.tasks, model.config.task_weights)
    return {
        "model": model,
        "data_collator": build_collator(model_args, run.args.seed),
        "train_dataset": data.rows["train"],
        "eval_dataset": data.rows["validation"],
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": metrics.reduce,
        "callbacks": [terms.schedule],
    }


def score(run: Run, trainer: Any, trained: Any, data: OperatorData) -> dict[str, Any]:
    """Scores validation and test beside predictions that learn nothing of the input."""
    scores = score_splits(trainer, data.rows, data.samples)
    requirements = parse_requirements(run.model_args.require, score_names(run.model_args.tasks))
    required = check_requirements(requirements, scores["test"]["scores"][MODEL])
    shown = format_scores(scores["test"])
    run.log.info("\nnRMSE on the test samples, none of which was trained on:\n%s", shown)
    return {"data": data.report, "verdict": scores["test"]["verdict"], **scores, "requirements": required}
