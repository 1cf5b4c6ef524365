"""The plan: detect, decide, check, apply, report. Every speed-up ends as one entry with a reason."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch

from .data.columns import column_names, has_numbered_rows, read_columns, row_lengths
from .data.random_states import kept_random_states
from .errors import PlanRefused
from .hardware import Hardware, count_cpu_cores, detect_hardware
from .models.blocks import describe_blocks, find_blocks
from .models.lora import has_adapters, unwrap_peft
from .models.muon import block_matrices, count_rest
from .models.packing import find_encoders
from .optional import installed_version
from .processes import import_deepspeed
from .reporting.tables import format_table
from .speedups import REGISTRY, Context, DataFacts, Decision, ModelFacts, Run
from .speedups.base import KIND_NAMES
from .whole_files import write_text
from .zero import num_elements

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "numpy")
PADDING_SAMPLE = 20_000  # rows that the share of padding is estimated from


@dataclass
class Plan:
    """Decisions about one run, in the order of application."""

    hardware: Hardware
    decisions: list[Decision]
    preset: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    context: Context | None = None

    def __getitem__(self, name: str) -> Decision:
        return next(decision for decision in self.decisions if decision.name == name)

    def applied(self, name: str) -> bool:
        """Whether a speed-up was applied; not, where the plan knows none of that name."""
        return any(decision.name == name and decision.status == "applied" for decision in self.decisions)

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
        import_deepspeed()  # seconds, which nobody pays who only makes arguments or a plan
        by_name = {speedup.NAME: speedup for speedup in REGISTRY}
        rejected: list[str] = []
        for i, decision in enumerate(self.decisions):
            speedup = by_name[decision.name]
            if rejected and self.context:
                decision = speedup.decide(self.context.leave_out(rejected)).of(speedup)
            if decision.status == "applied":
                decision = speedup.apply(decision, run).of(speedup)
                rejected += [decision.name] if decision.status != "applied" else []
            self.decisions[i] = decision
        self.check()

    def record(self, name: str, **evidence: Any) -> None:
        """Adds what was measured to a decision."""
        self.decisions = [d.with_evidence(**evidence) if d.name == name else d for d in self.decisions]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what `plan.json` holds."""
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
        write_text(path, json.dumps(self.to_dict(), indent=2, default=str) + "\n")
        return path

    def table(self) -> str:
        """The plan as text, one line per speed-up."""
        rows = [[d.name, KIND_NAMES[d.kind], d.status, d.reason + _evidence_text(d)] for d in self.decisions]
        title = f"Plan for {self.hardware.name}" + (f", preset {self.preset}" if self.preset else "")
        return f"{title}\n{format_table(rows, ['speed-up', 'class', 'status', 'why'])}"


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
    model_facts = describe_model(model, args.block_pattern)
    data_facts = describe_data(train_dataset, collator, args)
    context = Context(
        hardware=hardware or detect_hardware(args.device),
        args=copy.copy(args),  # as asked for: applying changes the run's own
        model=model_facts,
        data=data_facts,
        world_size=args.world_size,
        cpu_cores=count_cpu_cores(),
    )
    decisions = [speedup.decide(context).of(speedup) for speedup in REGISTRY]
    facts = {"model": asdict(model_facts), "data": asdict(data_facts)}
    return Plan(context.hardware, decisions, args.preset, facts, context)


def describe_model(model: Any, pattern: str | None = None) -> ModelFacts:
    """Names encoder families, frozen inputs and repeated layers (as `find_blocks`), counts parameters in memory."""
    if model is None:
        return ModelFacts()
    frozen = tuple(getattr(model, "frozen_inputs", ()))
    inputs = getattr(model, "embedding_sizes", {})
    config = getattr(model, "config", None)
    specs = getattr(config, "encoder_specs", None)
    families = {spec.config["model_type"] for spec in specs} if specs else {getattr(config, "model_type", None)}
    families |= set(getattr(model, "encoder_families", ()))  # of a model that is more than its encoder
    families |= {encoder.config.model_type for encoder in find_encoders(model)}  # of one around an encoder, too
    inner = unwrap_peft(model)
    return ModelFacts(
        families=tuple(sorted(filter(None, families))),
        classes=tuple(dict.fromkeys([type(inner).__name__, type(model).__name__])),
        frozen_inputs=frozen,
        trains_encoders=len(frozen) < len(inputs) or not inputs,
        num_parameters=sum(num_elements(p) for p in model.parameters()),
        num_trainable=sum(num_elements(p) for p in model.parameters() if p.requires_grad),
        blocks=describe_blocks(find_blocks(model, pattern)),
        num_block_matrices=len(block_matrices(model, pattern)),
        muon_leaves=count_rest(model, pattern),
        has_adapters=has_adapters(model),
        has_own_decoder=hasattr(model, "encoder_families"),
    )


def describe_data(dataset: Any, collator: Any, args: Any) -> DataFacts:
    """Row count, distinct inputs, and the padding that random batches would have."""
    if dataset is None:
        return DataFacts()
    if isinstance(dataset, Mapping):  # several, for a data loader of the user's
        return DataFacts()
    if not has_numbered_rows(dataset):
        return DataFacts(streaming=True)
    if len(dataset) == 0:  # refused where training begins; such a trainer may evaluate
        return DataFacts()
    with kept_random_states(dataset):  # of some, the first row is read
        names = column_names(dataset)
    inputs = getattr(collator, "columns", {})
    distinct = {
        name: len({parts for parts in read_columns(dataset, columns) if any(parts)})
        for name, columns in inputs.items()
        if set(columns) <= set(names)
    }
    lengths = None
    if distinct:
        lengths = row_lengths(dataset, inputs)
    elif isinstance(dataset, datasets.Dataset) and args.length_column_name in names:
        lengths = dataset[args.length_column_name][:]
    padding = None if lengths is None else padding_share(lengths, args.per_device_train_batch_size)
    return DataFacts(len(dataset), lengths is not None, padding, distinct)


def padding_share(lengths: list[int], batch_size: int) -> float:
    """Share of padding in random batches of `batch_size`, of 20,000 lengths drawn with a seed: files may be sorted."""
    values = torch.tensor(lengths)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:PADDING_SAMPLE]]
    batches = shuffled.split(batch_size)
    padded = sum(int(batch.max()) * len(batch) for batch in batches)
    return 1 - int(shuffled.sum()) / max(1, padded)


def _evidence_text(decision: Decision) -> str:
    return "".join(f"; {key}={value}" for key, value in decision.evidence.items() if not isinstance(value, dict | list))
