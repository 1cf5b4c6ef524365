"""The templates of launch/ that are YAML, read."""

from typing import Any

import yaml
from locations import ROOT

LAUNCH = ROOT / "launch"


def skypilot() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def kubeflow() -> dict[str, dict[str, Any]]:
    return {page["kind"]: page for page in yaml.safe_load_all((LAUNCH / "kubeflow_trainjob.yaml").read_text())}
