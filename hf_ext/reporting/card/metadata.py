"""The YAML block of a card: what the Hub filters and displays by."""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ...units import is_finite, metric_title
from ..report.generation import generation_scores, measure_title
from ..report.run_files import RunFiles
from ..report.values import as_dict
from .names import bases, is_hub_id, last_part

# Ids of https://huggingface.co/metrics where there is one.
_METRIC_IDS = {"spearman": "spearmanr", "pearson": "pearsonr", "r2": "r_squared"}
_NOT_METRICS = ("num_tokens",)


def card_data(run: RunFiles, title: str) -> ModelCardData:
    """The metadata of a run's model. Nothing in it is guessed: what is not known is left out."""
    found = _base_ids(run)
    dataset = data_source(run)
    results = eval_results(run)
    extra: dict[str, Any] = {"base_model_relation": base_relation(run)} if found else {}
    if has_licence_file(run):
        extra |= {"license_name": "see-license-file", "license_link": "LICENSE"}
    return ModelCardData(
        library_name=library_name(run),
        license="other" if has_licence_file(run) else "unknown",
        base_model=found or None,
        datasets=[dataset] if is_hub_id(dataset) else None,
        # No pipeline of transformers runs an affinity model, so it has no tag.
        pipeline_tag="fill-mask" if run.is_masked_lm else None,
        tags=_tags(run),
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=title,
        eval_results=results or None,
        **extra,
    )


def library_name(run: RunFiles) -> str:
    """Which library loads the model."""
    if not run.is_masked_lm:
        return "hf_ext"
    return "peft" if is_adapter(run) else "transformers"


def is_adapter(run: RunFiles) -> bool:
    """Whether the folder holds adapters of PEFT, which need their base model."""
    return (run.folder / "adapter_config.json").is_file()


def has_licence_file(run: RunFiles) -> bool:
    return (run.folder / "LICENSE").is_file()


def base_relation(run: RunFiles) -> str:
    """ "finetune" where pretrained weights were changed; "adapter" where they stay and something was added to them."""
    trainings = {base.get("training") for base in bases(run)}
    return "finetune" if "full" in trainings else "adapter"


def _base_ids(run: RunFiles) -> list[str]:
    found = [base["encoder"] for base in bases(run) if is_hub_id(base["encoder"], base.get("revision"))]
    return list(dict.fromkeys(found))


def _tags(run: RunFiles) -> list[str]:
    task = "masked-lm" if run.is_masked_lm else "antibody-generation" if run.is_generator else "regression"
    lora = ["lora"] if any(base.get("training") == "lora" for base in bases(run)) else []
    demo = ["demo"] if is_demo(run) else []
    return ["hf_ext", "biology", "protein", "protein-language-model", task, *lora, *demo]


def data_source(run: RunFiles) -> str:
    """Hub id, file or folder that the data was read from; empty where it was generated or not recorded."""
    return str(as_dict(run.results.get("data")).get("source") or "")


def is_demo(run: RunFiles) -> bool:
    """Whether the run trained on the generated demo data."""
    data = run.results.get("data")
    return isinstance(data, dict) and data.get("source") is None


def eval_results(run: RunFiles) -> list[EvalResult]:
    """The model's scores on the test split (validation where there is none) for `model-index`; only finite ones."""
    split, scores = scored_split(run)
    dataset = data_source(run)
    on_hub = is_hub_id(dataset)
    if is_demo(run):
        name, kind = "Generated demo data", "generated"
    else:
        name, kind = (dataset, dataset) if on_hub else (last_part(dataset), "local-file")
    task_type, task_name = "regression", "Regression on protein sequences"
    if run.is_masked_lm:
        task_type, task_name = "fill-mask", "Masked language modelling"
    elif run.is_generator:
        task_type, task_name = "text-generation", "Antibodies for an antigen"
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
                dataset_config=run.settings.get("dataset_config_name") if on_hub else None,
                dataset_revision=run.settings.get("dataset_revision") if on_hub else None,
                metric_type=_METRIC_IDS.get(metric, metric),
                metric_name=measure_title(metric) if run.is_generator else metric_title(metric),
                metric_value=value,
                verified=False,
            )
        )
    return results


def scored_split(run: RunFiles) -> tuple[str, dict[str, Any]]:
    """Name of the split that the card's scores are of, and predictor -> metric -> score."""
    if run.is_generator:
        return "test", generation_scores(run)
    for split in ("test", "validation"):
        found = as_dict(run.results.get(split))
        scores = found if run.is_masked_lm else as_dict(found.get("scores"))
        if scores:
            return split, scores
    return "test", {}
