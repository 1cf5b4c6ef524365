"""Live throughput in every run: see `hf_ext.reporting.throughput`."""

from __future__ import annotations

from typing import Any

from ..reporting.run_clock import RunClockCallback
from ..reporting.throughput import ThroughputCallback


class ThroughputMixin:
    """Measures each training run and adds the rates to its logs, to the metrics of `train` and to a file."""

    args: Any
    plan: Any
    state: Any
    keeps_records: bool  # of PlanMixin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.throughput = ThroughputCallback()
        super().__init__(*args, **kwargs)
        self.throughput.writes_file = self.keeps_records
        # MLM collators hold a tokenizer that nobody passed to the Trainer.
        self.throughput.tokenizer = getattr(self.data_collator, "tokenizer", None)  # type: ignore[attr-defined]
        self.throughput.packs = self.plan.applied("packing")
        self.add_callback(self.throughput)  # type: ignore[attr-defined]
        self.run_clock = RunClockCallback()
        self.add_callback(self.run_clock)  # type: ignore[attr-defined]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # The model of this run: with `model_init`, callbacks are handed the one before it (transformers 5.23).
        self.throughput.model = self.model  # type: ignore[attr-defined]
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, which takes the labels out of `inputs` where `compute_loss_func` is set."""
        if model.training:
            self.throughput.see_labels(inputs.get("labels"))
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; rates are added before any other callback and `log_history` see the values."""
        self.throughput.extend_logs(logs, self.args, self.state)
        super().log(logs, start_time)  # type: ignore[misc]
        self.throughput.resume()
