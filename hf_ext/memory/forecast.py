"""What one training step will take, line by line, with any of the switches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..models.wrapping import find_base_layers
from .fakes import Base
from .probe import Graph, Subject
from .stored import gradient_bytes, optimizer_bytes, weight_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One way to train the same model on the same rows.

    Attributes:
        rows: of one pass on one device.
        graph: what a pass computes; see there.
        optimizer: a value of Trainer's `--optim`.
        is_muon: Muon steps the matrices of encoder layers.
        on_host: the optimizer's states lie in host memory.
        passes: per optimizer step; from the second on, gradients are there before a pass begins.
    """

    rows: int
    graph: Graph = field(default_factory=Graph)
    optimizer: str = "adamw_torch_fused"
    is_muon: bool = False
    on_host: bool = False
    passes: int = 1


@dataclass(frozen=True)
class Forecast:
    """Bytes at the fullest moment of a step.

    Attributes:
        moment: "backward pass" or "optimizer step", whichever is fuller.
        host: what lies in host memory where the device is another.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int = 0
    moment: str = "backward pass"
    host: int = 0

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buckets

    def lines(self) -> list[tuple[str, int]]:
        """(what, bytes), which add up to the peak."""
        working = "activations" if self.moment == "backward pass" else "the optimizer's working copies"
        lines = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            (working, self.activations),
            ("buckets that gradients are sent in", self.buckets),
        ]
        return [(what, num_bytes) for what, num_bytes in lines if num_bytes]


@dataclass
class Forecaster:
    """Forecasts for one model and its batches; what choices have in common is computed once.

    Attributes:
        sends_gradients: whether several processes do (DDP), which holds all of them once more.
        tables: bytes of cached embeddings, which lie in host memory.
    """

    subject: Subject
    sends_gradients: bool = False
    tables: int = 0
    _impossible: set[Graph] = field(default_factory=set)
    _weights: dict[Base, int] = field(default_factory=dict)
    _states: dict[tuple[str, bool], tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def all_gradients(self) -> int:
        """Bytes of all gradients."""
        return gradient_bytes(self.subject.model)

    @cached_property
    def base_layers(self) -> list[Any]:
        """Frozen linear layers beside adapters, which could be stored in fewer bits."""
        return find_base_layers(self.subject.model)

    def stored(self, choice: Choice) -> int:
        """Bytes of weights, and of the optimizer's states on the device."""
        return self._weights_of(choice) + (0 if choice.on_host else self._states_of(choice)[0])

    def forecast(self, choice: Choice) -> Forecast:
        """The fullest moment of a step; see `Subject.timeline` for errors and cost."""
        weights, (states, working) = self._weights_of(choice), self._states_of(choice)
        standing = self.all_gradients if choice.passes > 1 else 0
        peak = self.subject.timeline(choice.graph, choice.rows).peak(standing)
        buckets = self.all_gradients if self.sends_gradients else 0
        host = self.tables + (states + self.all_gradients if choice.on_host else 0)
        kept, working = (0, 0) if choice.on_host else (states, working)  # the host steps tensor by tensor, fused
        backward = Forecast(weights, peak.gradients, kept, peak.activations, buckets, host=host)
        step = Forecast(weights, self.all_gradients, kept, working, buckets, "optimizer step", host)
        return max(backward, step, key=lambda found: found.peak)

    def try_forecast(self, choice: Choice) -> Forecast | None:
        """As `forecast`; None where the model does not compute so."""
        if choice.graph in self._impossible:
            return None
        try:
            return self.forecast(choice)
        except Exception:  # of a model of any class
            logger.debug("no forecast of %s", choice.graph, exc_info=True)
            self._impossible.add(choice.graph)
            return None

    def _weights_of(self, choice: Choice) -> int:
        base = choice.graph.base
        if base not in self._weights:
            self._weights[base] = weight_bytes(self.subject.model, base, self.base_layers)
        return self._weights[base]

    def _states_of(self, choice: Choice) -> tuple[int, int]:
        key = choice.optimizer, choice.is_muon
        if key not in self._states:
            self._states[key] = optimizer_bytes(self.subject.model, *key, self.subject.pattern)
        return self._states[key]


def choice_of(args: Any, rows: int, graph: Graph, is_muon: bool, on_host: bool) -> Choice:
    """The choice that training arguments make."""
    name = str(getattr(args.optim, "value", args.optim))
    return Choice(rows, graph, name, is_muon, on_host, args.gradient_accumulation_steps)
