"""What every speed-up shares: the facts it decides from, the decision it takes, the run it is applied to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import finalize

from torch import nn

from ..data import change_layout
from ..files import Facts, Json
from ..hardware import Hardware
from ..memory import NUMERICS, MemoryModel, Switch, TrainConfig
from ..models import Held, PaddingWatch
from ..processes import splits_weights
from .evidence.facts import DataFacts, ModelFacts

Kind = Literal["I", "N", "L"]  # identical mathematics, other numerics, changes learning
T = TypeVar("T")
Settings = Facts  # of a decision
Status = Literal["applied", "skipped", "refused", "off"]

KIND_NAMES: dict[Kind, str] = {"I": "identical", "N": "numerics", "L": "learning"}
ADAMW = ("adamw_torch_fused", "adamw_torch")  # values of `--optim` for torch's own
MIN_PADDING = 0.02  # fraction of a random batch below which taking padding away gains nothing


@dataclass(frozen=True)
class Decision:
    """What became of one speed-up, and why. `settings` is what `apply` acts on, `evidence` what was measured."""

    name: str
    kind: Kind
    status: Status
    reason: str
    settings: Json = field(default_factory=dict)
    evidence: Json = field(default_factory=dict)

    def with_evidence(self, **evidence: Any) -> Decision:
        return replace(self, evidence={**self.evidence, **evidence})

    def of(self, speedup: Speedup) -> Decision:
        """Puts the decision under the name and the kind of the speed-up that took it, as the plan does."""
        return self if self.name else replace(self, name=speedup.NAME, kind=speedup.KIND)


def applied(reason: str, settings: Json | None = None, evidence: Json | None = None) -> Decision:
    """Decides that it will be done."""
    return Decision("", "I", "applied", reason, settings or {}, evidence or {})


def skipped(reason: str, evidence: Json | None = None) -> Decision:
    """Makes the decision that this machine, model or library cannot; the run goes on without."""
    return Decision("", "I", "skipped", reason, {}, evidence or {})


def refused(reason: str) -> Decision:
    """Makes the decision that it would be wrong; the run does not begin."""
    return Decision("", "I", "refused", reason)


def cannot(reason: str, is_named: bool) -> Decision:
    """Refuses where the user asked for it by name, else skips."""
    return refused(reason) if is_named else skipped(reason)


def off(reason: str = "not asked for") -> Decision:
    """Makes the decision that it was not asked for, or that there is nothing to do."""
    return Decision("", "I", "off", reason)


@dataclass(frozen=True)
class Context:
    """All that a decision may depend on. `args` is read, never written, while decisions are taken."""

    hardware: Hardware
    args: Any
    model: ModelFacts = field(default_factory=ModelFacts)
    data: DataFacts = field(default_factory=DataFacts)
    world_size: int = 1
    cpu_cores: int = 1

    def wants(self, name: str, kind: Kind) -> bool:
        """Returns whether the user asked for a speed-up by name, or for all that leave learning as it is."""
        named = self.args.speedups or []
        return not self.leaves_out(name, kind) and (name in named or ("all" in named and kind != "L"))

    def leaves_out(self, name: str, kind: Kind) -> bool:
        """Returns whether the user left a speed-up out, by name or as one of those that change numerics."""
        left_out = self.args.without or []
        return name in left_out or (kind == "N" and "numerics" in left_out)

    def names(self, name: str) -> bool:
        """Returns whether the user asked for a speed-up by its name, and did not leave it out."""
        return name in (self.args.speedups or []) and name not in (self.args.without or [])

    def unasked(self, name: str, how: str) -> Decision:
        """Decides when the flag that a speed-up needs is absent: off, or how to ask for it where it was named."""
        return skipped(how) if name in (self.args.speedups or []) else off()

    def leave_out(self, names: list[str]) -> Context:
        """Returns these facts, with some speed-ups not wanted: what a measurement has rejected."""
        args = copy.copy(self.args)
        args.without = [*(args.without or []), *names]
        return replace(self, args=args)

    def user_set(self, field_name: str) -> bool:
        """Returns whether the user set a training argument, by command line, YAML or code, rather than a preset."""
        return field_name in self.args.explicit_fields

    @property
    def low_padding(self) -> str | None:
        """Why taking padding away gains nothing, where the data's lengths say so; else None."""
        fraction = self.data.padding_share_random
        if fraction is None or fraction >= MIN_PADDING:
            return None
        return f"random batches are only {fraction:.1%} padding"

    @property
    def replicas(self) -> str | None:
        """Why forwards that are replaced on a model cannot be: DataParallel's copies would call the original's."""
        if self.args.n_gpu < 2:
            return None
        return f"{self.args.n_gpu} GPUs in one process (DataParallel): start it with accelerate launch"

    @property
    def caches_all_inputs(self) -> bool:
        """Whether no encoder runs while training: every input comes from the embedding cache."""
        cached = self.wants("embedding_cache", "I") and not self.data.streaming
        return cached and bool(self.model.frozen_inputs) and not self.model.trains_encoders


@dataclass
class Run:
    """What decisions are applied to: the arguments of the run, its model, and how to build inputs for it.

    Attributes:
        own_loss: where the user's own loss comes from, which may read all that the model returns; None without one.
        own_batches: what else may change batches before the model gets them; None where nothing does.
        padding: tells whether the loss reads what packed encoders leave empty; None where none is packed.
        undo: what switches everything back, last first; `release`: of it what releases settings of the process, which
            must not outlive the run even if it is never ended.
    """

    args: Any
    model: Any
    collator: Any = None
    train_dataset: Any = None
    undo: list[Callable[[], None]] = field(default_factory=list)
    release: list[Callable[[], None]] = field(default_factory=list)
    own_loss: str | None = None
    own_batches: str | None = None
    padding: PaddingWatch | None = None

    def on_end(self, action: Callable[[], None]) -> None:
        """Registers what switches a setting, of the process or of the model, back when the run is over."""
        self.undo.append(action)

    def acquire(self, setting: Held[T], value: T) -> Callable[[], None]:
        """Sets what all runs of the process share, until this one is over; what it returns releases it before that."""
        release = setting.acquire(value)
        self.on_end(release)
        self.release.append(release)
        return release

    def release_with(self, trainer: Any) -> None:
        """Releases settings of the process when a trainer that was not ended goes."""
        finalize(trainer, _call_all, self.release).atexit = False

    def change_encoders(self, change: Callable[[Any], int]) -> int | None:
        """Changes encoders in place, also those that are loaded later; returns how many, None where more may come."""
        if hasattr(self.model, "transform_encoders"):
            self.model.transform_encoders(change)
            self.on_end(partial(self.model.forget_transform, change))
            return None
        return change(self.model)

    def ask_layout(self, **asked: bool) -> None:
        """Has the collator say where things stand (attributes of `LayoutMaker`), unless they may be moved later."""
        if self.own_batches is None:
            self.on_end(partial(change_layout, self.collator, **dict.fromkeys(asked, False)))
            change_layout(self.collator, **asked)

    def restore(self) -> None:
        """Switches back everything that was switched for this run, last first."""
        _call_all(self.undo)


def _call_all(actions: list[Callable[[], None]]) -> None:
    """Calls all, last first, each once."""
    while actions:
        actions.pop()()


@dataclass(frozen=True)
class Costs(TrainConfig):
    """What time, memory and disk are counted from: as the arguments have it, then as applied speed-ups leave it.

    Attributes:
        max_tokens: of a pass, where that is what batches are made by.
        trained_dtype: "bf16" or "fp16" where autocast computes in it; `frozen_dtype`: the same of frozen encoders.
        float32: "tf32" where what stays in float32 is multiplied so.
        pads: whether layers compute on padding.
        kept_bytes: most host memory that stays with the process although it was freed.
    """

    max_tokens: int | None = None
    trained_dtype: str | None = None
    frozen_dtype: str | None = None
    float32: str = "fp32"
    pads: bool = True
    kept_bytes: int = 0


class Speedup:
    """One speed-up: a card, a decision, what it does to a run, and all that others ask about it.

    Attributes:
        NAME, KIND: what users call it, and whether it changes numbers.
        predicts: whether commands that read a finished model use it where the user names none.
        compared: its settings that a continued run must have too, () for its status alone; None where it changes the
            rows of no step and no number beyond rounding, or acts through arguments or the model, which are compared.
        costs: fields of `Costs` that it sets where it is applied.
        group: what it makes smaller where it saves memory, one of `memory.report.GROUPS`.
    """

    NAME: str
    KIND: Kind = "I"
    predicts: bool = False
    compared: tuple[str, ...] | None = None
    costs: Settings = {}
    group: str = ""

    def wanted(self, context: Context) -> bool:
        """Returns whether the user asked for it, by name or as one of all that leave learning as it is."""
        return context.wants(self.NAME, self.KIND)

    def left_out(self, context: Context) -> bool:
        """Returns whether the user left it out."""
        return context.leaves_out(self.NAME, self.KIND)

    def decide(self, context: Context) -> Decision:
        """Returns applied, skipped, refused or off, from facts alone; changes nothing."""
        return self.decide_wanted(context) if self.wanted(context) else off()

    def decide_wanted(self, context: Context) -> Decision:
        """Decides where the user asked for it, for speed-ups that need no flag of their own."""
        raise NotImplementedError

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Carries an applied decision out; returns it with evidence, or as skipped where a measurement forbids it.

        As it stands, changes nothing: a component of `hf_ext/training` does what was decided.
        """
        return decision

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Gives another model, or an encoder, what was applied to the run's, without proof that they agree."""

    def change_traced(self, model: nn.Module, settings: Settings, costs: Costs) -> None:
        """Does the same to a model on tensors without values, whose memory is counted."""
        self.change(model, settings)

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Returns the costs of a run in which it is applied."""
        return replace(costs, **self.costs)

    def saves_memory(self, memory: MemoryModel, config: TrainConfig) -> bool:
        """Returns whether a step of this model would take less memory with it."""
        return False

    def offer(self, memory: MemoryModel, config: TrainConfig) -> Switch | None:
        """Returns how to ask for it, and the costs that it sets, where it saves memory."""
        if not self.saves_memory(memory, config):
            return None
        return Switch(f"--speedups all {self.NAME}", self.group, self.costs, NUMERICS if self.KIND == "N" else "")


# Why nothing was changed: a subclass, or a user who put another on the instance.
OTHER_FORWARD = "the forward of such modules here is not that of transformers"


def optimizer_name(args: Any) -> str:
    """Names a value of Trainer's `--optim`, which is a name or one of its enumeration."""
    return str(getattr(args.optim, "value", args.optim))


def are_weights_split(args: Any) -> bool:
    """Returns whether FSDP or DeepSpeed has processes hold fractions of what is trained."""
    return bool(args.fsdp) or args.deepspeed_plugin is not None or splits_weights(args)
