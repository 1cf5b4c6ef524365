"""The metrics as `evaluate.Metric` classes that come with the package: no Hub, no network, no remote code.

One file per metric, as `evaluate.load(path)` wants it. Such a file imports modules and never a metric class by name:
`evaluate` takes the first metric class it finds in the file, and that would be the imported one.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentError

if TYPE_CHECKING:
    import evaluate

_CLASS_NAMES = {
    "spearman": "Spearman",
    "pearson": "Pearson",
    "rmse": "Rmse",
    "mae": "Mae",
    "r2": "R2",
    "recall": "Recall",
    "precision": "Precision",
    "f1": "F1",
    "per_group_spearman": "PerGroupSpearman",
}
METRIC_NAMES = tuple(_CLASS_NAMES)


def load_metric(name: str, *, keep_in_memory: bool | None = None, **kwargs: Any) -> evaluate.Metric:
    """Make one of the package's metrics, ready for `add_batch`, `compute` and `evaluate.combine`.

    Args:
        name: one of `METRIC_NAMES`.
        keep_in_memory: hold the rows in memory, without a file and its lock under the Hugging Face cache. None: yes,
            unless `num_process` is above 1, where `evaluate` cannot.
        **kwargs: for the metric's constructor: `threshold` for recall, precision and F1; `experiment_id`, `num_process`
            and the like for all.

    Raises:
        ArgumentError: no such metric, or no such constructor argument.
    """
    _check_name(name)
    module = importlib.import_module(f".{name}", __name__)
    if keep_in_memory is None:
        keep_in_memory = kwargs.get("num_process", 1) == 1
    return getattr(module, _CLASS_NAMES[name])(keep_in_memory=keep_in_memory, **kwargs)


def metric_path(name: str) -> str:
    """Return the path of a metric's file for `evaluate.load(path)`, which copies that file into its modules cache.

    Raises:
        ArgumentError: no such metric.
    """
    _check_name(name)
    return str(Path(__file__).with_name(f"{name}.py"))


def _check_name(name: str) -> None:
    if name not in _CLASS_NAMES:
        raise ArgumentError(f"metric {name!r}: allowed are {', '.join(METRIC_NAMES)}.")
