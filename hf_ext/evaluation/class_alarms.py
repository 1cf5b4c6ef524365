"""Plain sentences about probabilities that have collapsed: one class everywhere, or hardly any difference of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..labels import LabelKind
from .kind_baselines import predict_constant
from .kinds import known_values, rows_for

MIN_ROWS = 30  # below this, shares and spreads are too uncertain to raise an alarm about
MIN_SPREAD_RATIO = 0.1
NUM_NAMED = 3


def examine_probabilities(kind: LabelKind, predictions: Any, references: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Describes probabilities beside what is true, and says what is alarming.

    Args:
        kind: of classes or several labels; predictions and references as `rows_for` takes them.

    Returns:
        `n` values; `log_loss`, and `reference_log_loss`, that of predicting the shares in these references;
        `spread_ratio`, the standard deviation of the probabilities divided by that of the truth; of classes also
        `num_distinct`, how many are predicted, and `never_predicted`, names of those that 30 values and more are; None
        where undefined. And alarms by what they are about.
    """
    values, truth, _ = known_values(kind, predictions, references)
    sizes: Any = [len(row) for row in references] if kind.per_residue else len(references)
    constant = predict_constant(kind, references, sizes)
    loss, of_constant = (rows_for(kind, each, references).value("log_loss") for each in (predictions, constant))
    report: dict[str, Any] = {"n": len(values), "log_loss": loss.known, "reference_log_loss": of_constant.known}
    report |= {"spread_ratio": None, "num_distinct": None, "never_predicted": []}
    if loss.undefined:
        return report, {"not finite predictions": f"{loss.undefined}."}
    shares = np.ravel(predict_constant(kind, references, [1] if kind.per_residue else 1)[0])
    if variance := np.nansum(shares * (1 - shares)):
        report["spread_ratio"] = float(np.sqrt(np.var(values, axis=0, dtype=np.float64).sum() / variance))
    found, alarms = values.argmax(axis=1), {}
    if kind.task != "multilabel":
        occurs, called = (np.bincount(each, minlength=len(kind.names)) for each in (truth.astype(np.int64), found))
        report["num_distinct"] = int(np.count_nonzero(called))
        report["never_predicted"] = [kind.names[j] for j in np.flatnonzero((occurs >= MIN_ROWS) & (called == 0))]
    if len(values) < MIN_ROWS or not variance:
        return report, {}
    if report["num_distinct"] == 1:
        text = f"All {len(values):,} predictions are {kind.names[found[0]]}: the model is a constant."
        alarms["one value"] = text
    elif never := report["never_predicted"]:
        more = f" and {len(never) - NUM_NAMED:,} more" if len(never) > NUM_NAMED else ""
        named = ", ".join(never[:NUM_NAMED]) + more
        alarms["never predicted"] = f"Never predicted, though {MIN_ROWS} labels or more are it: {named}."
    if (ratio := report["spread_ratio"]) < MIN_SPREAD_RATIO:
        text = f"The probabilities spread {ratio:.3f} times as far as the labels: close to a constant."
        alarms["little spread"] = text
    if loss.value >= of_constant.value:
        than = f"{of_constant.value:.4f} of predicting the shares in these labels everywhere"
        alarms["no better"] = f"Log loss {loss.value:.4f} is no better than the {than}."
    return report, alarms
