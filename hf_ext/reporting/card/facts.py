"""What a run's record and folder say of its data, its files and the columns that its model reads."""

from __future__ import annotations

from typing import Any

from ..report.columns import list_columns
from ..report.run_files import RunFiles
from ..report.values import as_dict

GENERATED = "generated"  # the source of data that a task makes by itself, which is more than a demo


def data_source(run: RunFiles) -> str:
    """Hub id, file or folder that the data was read from; empty where it was generated or not recorded."""
    source = str(as_dict(run.results.get("data")).get("source") or "")
    return "" if source == GENERATED else source


def is_demo(run: RunFiles) -> bool:
    """Whether the run trained on the generated demo data."""
    data = run.results.get("data")
    return isinstance(data, dict) and data.get("source") is None


def is_adapter(run: RunFiles) -> bool:
    """Whether the folder holds adapters of PEFT, which need their base model."""
    return (run.folder / "adapter_config.json").is_file()


def has_licence_file(run: RunFiles) -> bool:
    return (run.folder / "LICENSE").is_file()


def sequence_columns(run: RunFiles) -> list[str]:
    """The columns that the model reads, in its order."""
    return list_columns(run) or ["sequence"]


def named_base(run: RunFiles) -> list[dict[str, Any]]:
    """The model that training went on from, as `TaskCard.bases` lists such; none for a new model."""
    name = run.settings.get("model_name_or_path")
    if not name:
        return []
    training = "lora" if run.settings.get("use_peft") else "full"
    return [{"encoder": name, "revision": run.settings.get("model_revision"), "training": training}]
