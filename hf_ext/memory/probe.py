"""One forward and backward pass of a model's own classes on tensors without memory, with the ledger beside it.

Cost: 0.05 to 0.1 s on one core for a layer's classes of any width, the weights of no model read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..models.activation_checkpointing import POLICIES, Policy, set_policy
from ..models.lora import unwrap_peft
from .fakes import Base, Cut, autocast_rule, copy_as_fake, fake_batch, plan_cuts
from .ledger import BLOCK_BYTES, GRADIENTS, OTHER, Ledger, storage_key
from .timeline import Middle, Timeline

# A prime, so that no width is a multiple of it, and large, so that rounding does not count. Nothing is that large.
MANY_ROWS = 1009
# Layers that repeat together: every second one is computed again under "half", and a model may have that already.
PERIODS: dict[Policy | None, int] = {**dict.fromkeys(POLICIES, 1), "half": 2, None: 2}
Mark = tuple[int, Literal["forward", "backward"], int, int]  # moment, pass, which list, which layer


@dataclass(frozen=True)
class Graph:
    """What decides which operations a pass does; batches of any size and optimizers of any kind share it.

    Attributes:
        policy: which layers are computed again in the backward pass; None: as the model has it.
        half: under autocast to bf16 or fp16.
        base: how frozen linear layers beside adapters are stored.
    """

    policy: Policy | None = None
    half: bool = False
    base: Base = "as it is"


@dataclass
class Subject:
    """A model and the batches it trains on.

    Attributes:
        model: real, or on torch's meta device.
        make_batch: rows -> arguments of its forward, tensors real or on the meta device.
        kind: of the hardware, as `Hardware.kind`: CUDA's autocast keeps norms in float32.
        change: done to the copy before it computes: what a plan will do to the model later.
        block: what the allocator rounds to.
        scales: whether a batch of any number of rows does the same operations, on tensors that grow with it or do not:
            one pass then answers for all. Not so for kernels that go by blocks of rows.
        pattern: of the names of repeated layers, as of `find_blocks`.
        has_one_batch: `make_batch` gives the same batch whatever is asked for: of models that nothing is known of.
    """

    model: nn.Module
    make_batch: Callable[[int], dict[str, Any]]
    kind: str = "cuda"
    change: Callable[[Any], Any] | None = None
    block: int = BLOCK_BYTES
    scales: bool = True
    has_one_batch: bool = False
    pattern: str | None = None
    known: dict[tuple[Graph, int], Timeline] = field(default_factory=dict)
    _cuts: dict[int, list[Cut]] = field(default_factory=dict)

    def cuts(self, period: int) -> list[Cut]:
        """As `plan_cuts`."""
        if period not in self._cuts:
            self._cuts[period] = plan_cuts(self.model, period, self.pattern)
        return self._cuts[period]

    def timeline(self, graph: Graph, rows: int) -> Timeline:
        """What is held at each moment of a pass of `rows` rows. Cost: a pass for each graph, if `scales`."""
        if graph.base == "8-bit":  # the same operations as of 4 bits: stored weights are not in a timeline
            graph = replace(graph, base="4-bit")
        computed = MANY_ROWS if self.scales else rows
        if (graph, computed) not in self.known:
            self.known[graph, computed] = run_pass(self, graph, computed)
        found = self.known[graph, computed]
        return found.with_rows(rows / computed) if self.scales else found


def run_pass(subject: Subject, graph: Graph, rows: int) -> Timeline:
    """Copies, computes, and lets go of it again.

    Raises:
        Exception: whatever the model raises on tensors without values.
    """
    batch = subject.make_batch(rows)
    cuts = subject.cuts(PERIODS[graph.policy])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = copy_as_fake(subject.model, cuts, graph.base)
        if subject.change is not None:
            subject.change(model)
        if graph.policy is not None:
            set_policy(model, graph.policy, subject.pattern)
        ledger = LayerLedger(subject.block, rows if subject.scales else 0)
        return record_pass(ledger, model.train(), cuts, fake_batch(mode, batch), graph.half, subject.kind)


def record_pass(
    ledger: LayerLedger, model: Any, cuts: Sequence[Cut], batch: dict[str, Any], half: bool, kind: str
) -> Timeline:
    """One forward and backward pass with the ledger beside it, of real tensors on a CPU or of fake ones.

    Args:
        cuts: of the model that `model` was copied from; none for a model that stands for itself.
        half, kind: as of `Graph` and `Subject`.
    """
    marks: list[Mark] = []
    with ExitStack() as around:
        opened = around.enter_context(autocast_rule(half, kind))
        ledger.know([*model.parameters(), *model.buffers()])
        weights = ledger.total
        ledger.know(_tensors(batch), OTHER)
        _watch(model, ledger, cuts, marks, around)
        around.enter_context(ledger)
        with opened():
            loss = _loss(model(**batch))
        if loss.requires_grad:
            loss.backward()
        del loss
    others, growing, gradients = np.array(ledger.levels, np.int64).T
    return Timeline(others - weights, gradients, _middles(marks, cuts), growing)


def _loss(outputs: Any) -> torch.Tensor:
    """The model's own; of one without, the sum of what it puts out first."""
    found = outputs.get("loss") if isinstance(outputs, dict) else None
    first = outputs[0] if found is None else found
    return first if first.dim() == 0 else first.float().sum()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    return [tensor for part in values for tensor in _tensors(part)]


def _watch(model: nn.Module, ledger: LayerLedger, cuts: Sequence[Cut], marks: list[Mark], around: ExitStack) -> None:
    """Notes when each kept layer begins, forward and backward, and tells the ledger which tensors are gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(lambda p: ledger.know([p.grad], GRADIENTS))
            around.callback(handle.remove)
    for index, cut in enumerate(cuts):
        if cut.kept < len(cut.layers):
            for number, layer in enumerate(unwrap_peft(model).get_submodule(cut.name).children()):
                watch = _Watch(ledger, marks, index, number, cut)
                layer.register_forward_pre_hook(watch.begin)
                layer.register_forward_hook(watch.end)


class LayerLedger(Ledger):
    """Knows which storages were made in a layer that stands for others.

    What lives until all layers are done, as autocast's copies of weights do, is let go for all of them at once.

    Attributes:
        others_alike: how many more layers the one that computes stands for.
        between: whether no layer computes.
    """

    def __init__(self, block: int, rows: int):
        super().__init__(block, rows)
        self.others_alike, self.between = 0, True
        self._made: dict[int, int] = {}
        self._freed = self._freed_growing = 0  # of the layers that were left out

    def _add(self, tensor: torch.Tensor, category: str = OTHER) -> None:
        before = len(self._entries)
        super()._add(tensor, category)
        if self.others_alike and len(self._entries) > before:
            self._made[storage_key(tensor)] = self.others_alike

    def _free(self, key: int) -> None:
        others_alike = self._made.pop(key, 0)
        if self.between and others_alike:
            _, num_bytes, growing = self._entries[key]
            self._freed += others_alike * num_bytes
            self._freed_growing += others_alike * growing
        super()._free(key)

    def _note(self) -> None:
        super()._note()
        others, growing, gradients = self.levels[-1]
        self.levels[-1] = others - self._freed, growing - self._freed_growing, gradients


@dataclass(frozen=True)
class _Watch:
    """Notes when one kept layer begins, forward and backward."""

    ledger: LayerLedger
    marks: list[Mark]
    index: int
    number: int
    cut: Cut

    def begin(self, module: nn.Module, args: Any) -> None:
        self._note("forward")
        self.ledger.between = False
        self.ledger.others_alike = self.cut.copies - 1 if 0 <= self.number - self.cut.first < self.cut.period else 0

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ledger.between = self.number == self.cut.kept - 1
        self.ledger.others_alike = 0
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(self.turn)

    def turn(self, gradient: torch.Tensor) -> None:
        self._note("backward")
        self.ledger.between = False

    def _note(self, kind: Literal["forward", "backward"]) -> None:
        self.marks.append((len(self.ledger.levels), kind, self.index, self.number))


def _middles(marks: list[Mark], cuts: Sequence[Cut]) -> tuple[Middle, ...]:
    """Where the layers that stand for all in the middle begin and end, in both directions."""
    middles, begun = [], {}
    for moment, kind, index, number in marks:
        cut = cuts[index]
        low, high = cut.first, cut.first + cut.period
        first, last = (low, high) if kind == "forward" else (high - 1, low - 1)
        if number == first:
            begun[kind, index] = moment
        elif number == last and (kind, index) in begun:
            middles.append(Middle(begun.pop((kind, index)), moment, cut.copies))
    return tuple(middles)
