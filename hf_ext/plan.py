"""The plan: detect, decide, check, apply, report. Every speed-up ends as one entry with a reason."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from . import speedups
from .errors import PlanRefused
from .files import Json
from .hardware import Hardware, count_cpu_cores, detect_hardware
from .optional import installed_version
from .processes import import_deepspeed
from .speedups import (
    KIND_NAMES,
    Context,
    Costs,
    Decision,
    Run,
    Speedup,
    describe_data,
    describe_model,
    find_speedup,
    optimizer_name,
)
from .text import format_table, write_json

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "numpy")


@dataclass
class Plan:
    """Decisions about one run, in the order of application."""

    hardware: Hardware
    decisions: list[Decision]
    preset: str | None = None
    facts: Json = field(default_factory=dict)
    context: Context | None = None

    def __getitem__(self, name: str) -> Decision:
        """Returns what was decided about a speed-up. Raises as `find_speedup`."""
        find_speedup(name)
        return next(decision for decision in self.decisions if decision.name == name)

    def applied(self, name: str) -> bool:
        """Returns whether a speed-up was applied. Raises as `find_speedup`."""
        return find_speedup(name) in [speedup for speedup, _ in self._on()]

    def check(self) -> None:
        """Raises PlanRefused if any decision is refused, naming all of them."""
        refused = [f"  {d.name}: {d.reason}" for d in self.decisions if d.status == "refused"]
        if refused:
            raise PlanRefused("The run does not start, because it would not do what was asked:\n" + "\n".join(refused))

    def apply(self, run: Run) -> None:
        """Carries out applied decisions in registry order.

        A measurement may turn one into a skipped one; those after it are then decided again without it.

        Raises:
            PlanRefused: a decision taken again is refused.
        """
        import_deepspeed()  # takes seconds: not for those who only make arguments or a plan
        rejected: list[str] = []
        for i, decision in enumerate(self.decisions):
            speedup = find_speedup(decision.name)
            if rejected and self.context:
                decision = speedup.decide(self.context.leave_out(rejected)).of(speedup)
            if decision.status == "applied":
                decision = speedup.apply(decision, run).of(speedup)
                rejected += [decision.name] if decision.status != "applied" else []
            self.decisions[i] = decision
        self.check()

    def speed_up(self, model: nn.Module) -> None:
        """Gives a model, or an encoder, the forwards that were applied to the run's, without proof that they agree."""
        for speedup, settings in self._on():
            speedup.change(model, settings)

    def speed_up_traced(self, model: nn.Module, costs: Costs) -> None:
        """Does the same to a model on tensors without values, whose memory is counted."""
        for speedup, settings in self._on():
            speedup.change_traced(model, settings, costs)

    def count_costs(self, args: Any) -> Costs:
        """Returns what time, memory and disk are counted from: arguments as asked for, and what was applied to them."""
        costs = Costs(
            args.per_device_train_batch_size,
            recomputes=args.activation_checkpointing is True,
            every_n_layers=(args.activation_checkpointing_kwargs or {}).get("every_n_layers", 1),
            optimizer=optimizer_name(args),
            passes=args.gradient_accumulation_steps,
        )
        for speedup, settings in self._on():
            costs = speedup.count(costs, settings)
        return costs

    def compared(self) -> dict[str, Json]:
        """Returns what a continued run must have too: of applied speed-ups, the settings that matter by their names."""
        found = {}
        for speedup, settings in self._on():
            if speedup.compared is not None:
                found[speedup.NAME] = {key: settings.get(key) for key in speedup.compared}
        return found

    def _on(self) -> list[tuple[Speedup, Json]]:
        return [(find_speedup(one.name), one.settings) for one in self.decisions if one.status == "applied"]

    def record(self, name: str, **evidence: Any) -> None:
        """Adds what was measured to a decision. Raises as `find_speedup`."""
        find_speedup(name)
        self.decisions = [d.with_evidence(**evidence) if d.name == name else d for d in self.decisions]

    def to_dict(self) -> Json:
        """Returns a JSON-able dictionary, which `plan.json` holds."""
        return {
            "preset": self.preset,
            "hardware": asdict(self.hardware),
            "versions": {name: installed_version(name) for name in _PACKAGES},
            "facts": self.facts,
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `plan.json` into `folder`."""
        path = Path(folder) / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_dict())
        return path

    def table(self) -> str:
        """Formats the plan: a line for each speed-up that is on, and the names of those that were asked for in vain."""
        on = [decision for decision in self.decisions if decision.status == "applied"]
        title = f"Plan for {self.hardware.name}" + (f", preset {self.preset}" if self.preset else "")
        title += f": {len(on)} of {len(self.decisions)} speed-ups are on"
        rows = [[d.name, KIND_NAMES[d.kind], d.reason] for d in on]
        skipped = ", ".join(decision.name for decision in self.decisions if decision.status == "skipped")
        lines = [title]
        if rows:
            lines.append(format_table(rows, ["speed-up", "class", "why"]))
        if skipped:
            lines.append(f"Left out, as they bring nothing or cannot work here: {skipped}.")
        return "\n".join([*lines, "plan.json and report.html have all of them, with reasons and measurements."])


def make_plan(
    args: Any,
    model: Any = None,
    train_dataset: Any = None,
    collator: Any = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Decides every speed-up; changes nothing.

    Args:
        args: `FastTrainingArguments`.
        model, train_dataset, collator: as for `FastTrainer`; decisions that need what is absent are skipped.
        hardware: described hardware instead of this machine's.
    """
    model_facts = describe_model(model)
    data_facts = describe_data(train_dataset, collator, args)
    context = Context(
        hardware=hardware or detect_hardware(args.device),
        args=copy.copy(args),  # as asked for: applying changes the run's own
        model=model_facts,
        data=data_facts,
        world_size=args.world_size,
        cpu_cores=count_cpu_cores(),
    )
    decisions = [speedup.decide(context).of(speedup) for speedup in speedups.REGISTRY]
    facts = {"model": asdict(model_facts), "data": asdict(data_facts)}
    return Plan(context.hardware, decisions, args.preset, facts, context)
