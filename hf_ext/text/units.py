"""Numbers and metrics as a reader wants them: sensible digits, units, words where there is no number, names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

NOT_MEASURED = "not measured"
MISSING = "-"
# What a metric's name ends in where less is better.
ERRORS = ("loss", "rmse", "mse", "mae", "perplexity", "calibration_error")
# Logged name -> in a table or a sentence, as a title of its own. Others are their logged names without underscores.
_METRICS = {
    "spearman": ("Spearman", "Spearman's rho"),
    "pearson": ("Pearson", "Pearson's r"),
    "rmse": ("RMSE", "RMSE"),
    "mae": ("MAE", "MAE"),
    "nrmse": ("nRMSE", "nRMSE, overall"),
    "r2": ("R2", "R2"),
    "f1": ("F1", "F1"),
    "mcc": ("MCC", "Matthews correlation"),
    "macro_f1": ("macro F1", "F1, mean over classes"),
    "f1_max": ("maximal F1", "F1 of all pairs at its best threshold"),
    "fmax_protein": ("Fmax", "Fmax by protein, as CAFA counts it"),
    "auroc": ("AUROC", "Area under the ROC curve"),
    "per_protein_spearman": ("Spearman within proteins", "Mean Spearman's rho per protein"),
    "per_group_spearman": ("Spearman within groups", "Mean Spearman's rho per group"),
    "token_loss": ("loss per residue", "Cross-entropy per masked residue"),
    "num_tokens": ("masked residues", "Masked residues"),
}
_TIMES = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def metric_name(metric: str) -> str:
    """Returns the name that a reader knows a metric by."""
    part = _part_of_nrmse(metric)
    return f"nRMSE of {part}" if part else _METRICS.get(metric, (metric.replace("_", " "),))[0]


def metric_title(metric: str) -> str:
    """Returns the same in full, where nothing beside it says what it is of."""
    if _part_of_nrmse(metric):
        return metric_name(metric)
    return _METRICS.get(metric, (metric.replace("_", " ").capitalize(),))[-1]


def _part_of_nrmse(metric: str) -> str:
    """Returns what an nRMSE is of, where it is of a part: "darcy2d" of `darcy2d_nrmse`; else nothing."""
    return metric.removesuffix("_nrmse") if metric.endswith("_nrmse") else ""


def less_is_better(metric: str) -> bool:
    """Returns whether a metric is an error; by the end of its name, so of `eval_antigens_rmse` too."""
    return metric.endswith(ERRORS)


def is_finite(value: object) -> TypeGuard[float]:
    """Returns whether a value is a finite number; booleans are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def format_cell(value: object) -> str:
    """Formats one cell: 26,000; 0.819; 1.20e-05; yes; "-" for None. Numpy scalars read as Python's."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return " ".join(str(value).split())
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.2e}"


def number(value: Any) -> str:
    """Formats 26,000; 30; 0.819; 1.20e-05; yes; text as it is; "not measured" for None."""
    if value is None:
        return NOT_MEASURED
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e9
    return format_cell(int(value) if whole else value)


def rounded(value: float | None) -> str:
    """Formats 187,770; 12.5; 0.0123: whole from 100 on, three digits below."""
    return f"{value:,.0f}" if is_finite(value) and abs(value) >= 100 else _measured(value, "{:.3g}")


def seconds(value: object) -> str:
    """Formats 0.34 s; 34.2 s; 12 min 30 s; 3 h 12 min; 2 d 4 h."""
    for size, unit, smaller_size, smaller in _TIMES:
        if is_finite(value) and value >= size:
            rest = int(value % size // smaller_size)
            return f"{int(value // size)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return _measured(value, "{:.3g} s")


def seconds_span(span: tuple[float, float]) -> str:
    """Formats an estimate, in few digits: 5 s to 12 min; 1.5 h to 4.0 h."""
    return f"{estimated(span[0])} to {estimated(span[1])}" if span[1] >= 0.1 else "less than 0.1 s"


def estimated(value: float) -> str:
    """Formats estimated seconds, rounded: 0.5 s; 12 min; 1.5 h."""
    if value < 60:
        return f"{value:.0f} s" if value >= 1 or value < 0.05 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def share(value: object) -> str:
    """Formats 12.3 %."""
    return _measured(value, "{:.3g} %", 100)


def gib(value: object) -> str:
    """Formats 1.25 GiB, of a number of GiB."""
    return _measured(value, "{:.3g} GiB")


def memory(num_bytes: float) -> str:
    """Formats 2.50 GiB; 12.0 MiB: memory is counted in powers of two."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"


def storage(num_bytes: float) -> str:
    """Formats 2.50 GB; 1.25 MB: disks and quotas are sold in powers of ten."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def score(entry: object) -> str:
    """Formats a score with its interval: 0.877 [0.850, 0.901]; "undefined" where it has no value.

    A number as `number`.
    """
    if not isinstance(entry, Mapping) or not entry:
        return number(None if isinstance(entry, Mapping) else entry)
    if not is_finite(entry.get("value")):
        return "undefined"
    numbers = [float(entry[key]) for key in ("value", "low", "high") if is_finite(entry.get(key))]
    # One number of digits for all three: an R2 of -0.0009 [-0.019, 0] is read at a glance.
    small = max(map(abs, numbers)) < 0.001
    value, *interval = [
        format_cell(end) if small or abs(end) >= 1000 else f"{round(end, 3) + 0.0:.3f}" for end in numbers
    ]
    return f"{value} [{', '.join(interval)}]" if len(interval) == 2 else value


def join_words(words: Sequence[str]) -> str:
    """Joins words: heavy, light and antigen."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def capitalize(text: str) -> str:
    """Changes the first letter only: what follows may be the name of a column."""
    return text[:1].upper() + text[1:]


def _measured(value: object, form: str, times: float = 1) -> str:
    return form.format(times * value) if is_finite(value) else NOT_MEASURED
