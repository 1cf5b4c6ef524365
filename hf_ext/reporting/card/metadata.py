"""The YAML block of a card: what the Hub filters and displays by."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..report.values import as_dict
from ..units import is_finite
from .facts import data_source, has_licence_file, is_demo
from .names import is_hub_id
from .tasks import TaskCard

# Ids of https://huggingface.co/metrics where there is one.
_METRIC_IDS = {"spearman": "spearmanr", "pearson": "pearsonr", "r2": "r_squared"}
_NOT_METRICS = ("num_tokens",)


def card_data(task: TaskCard, title: str) -> ModelCardData:
    """The metadata of a run's model. Nothing in it is guessed: what is not known is left out."""
    run, found = task.run, _base_ids(task)
    dataset = data_source(run)
    results = eval_results(task)
    extra: dict[str, Any] = {"base_model_relation": base_relation(task)} if found else {}
    if has_licence_file(run):
        extra |= {"license_name": "see-license-file", "license_link": "LICENSE"}
    return ModelCardData(
        library_name=task.library_name,
        license="other" if has_licence_file(run) else "unknown",
        base_model=found or None,
        datasets=[dataset] if is_hub_id(dataset) else None,
        pipeline_tag=task.pipeline_tag,
        tags=_tags(task),
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=title,
        eval_results=results or None,
        **extra,
    )


def base_relation(task: TaskCard) -> str:
    """ "finetune" where pretrained weights were changed; "adapter" where they stay and something was added to them."""
    trainings = {base.get("training") for base in task.bases()}
    return "finetune" if "full" in trainings else "adapter"


def _base_ids(task: TaskCard) -> list[str]:
    found = [base["encoder"] for base in task.bases() if is_hub_id(base["encoder"], base.get("revision"))]
    return list(dict.fromkeys(found))


def _tags(task: TaskCard) -> list[str]:
    lora = ["lora"] if any(base.get("training") == "lora" for base in task.bases()) else []
    demo = ["demo"] if is_demo(task.run) else []
    return ["hf_ext", *task.tags, *lora, *demo]


def eval_results(task: TaskCard) -> list[EvalResult]:
    """The model's scores on the test split (validation where there is none) for `model-index`; only finite ones."""
    (split, scores), (kind, name), settings = task.scored_split(), task.dataset(), task.run.settings
    on_hub = is_hub_id(data_source(task.run))
    task_type, task_name = task.index_task
    results = []
    for metric, score in as_dict(scores.get("model")).items():
        value = score.get("value") if isinstance(score, dict) else score
        if metric in _NOT_METRICS or not is_finite(value):
            continue
        results.append(
            EvalResult(
                task_type=task_type,
                task_name=task_name,
                dataset_type=kind,
                dataset_name=name,
                dataset_split=split,
                dataset_config=settings.get("dataset_config_name") if on_hub else None,
                dataset_revision=settings.get("dataset_revision") if on_hub else None,
                metric_type=_METRIC_IDS.get(metric, metric),
                metric_name=task.metric_title(metric),
                metric_value=value,
                verified=False,
            )
        )
    return results
