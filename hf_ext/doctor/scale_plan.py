"""What a run would take on 1, 2, 4, ... GPUs: memory, communication, and the launcher file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ..speedups import batch_size
from . import scaling
from .arguments import DoctorArguments
from .facts import Facts
from .links import LINKS, Link, ring_bandwidth, usual_link


@dataclass(frozen=True)
class LauncherFile:
    """A file of accelerate_configs/, by the layout that it asks for."""

    name: str
    strategy: str
    num_processes: int
    num_machines: int = 1
    precision: str = "bf16"
    offload: bool = False


FILES = (
    LauncherFile("1gpu_t4_fp16", "one process", 1, precision="fp16"),
    LauncherFile("1gpu_a100_bf16", "one process", 1),
    LauncherFile("1gpu_h100_bf16", "one process", 1),
    LauncherFile("2gpu_baseline", "DDP", 2, precision="fp16"),
    LauncherFile("4gpu_baseline", "DDP", 4, precision="fp16"),
    LauncherFile("2gpu_ddp", "DDP", 2),
    LauncherFile("4gpu_ddp", "DDP", 4),
    LauncherFile("8gpu_ddp", "DDP", 8),
    LauncherFile("2gpu_fsdp2", "FSDP2", 2),
    LauncherFile("4gpu_fsdp2", "FSDP2", 4),
    LauncherFile("8gpu_fsdp2", "FSDP2", 8),
    LauncherFile("2node_8gpu_fsdp2", "FSDP2", 16, num_machines=2),
    LauncherFile("4gpu_fsdp2_offload", "FSDP2", 4, offload=True),
    LauncherFile("4gpu_zero2", "ZeRO-2", 4),
    LauncherFile("4gpu_zero3_offload", "ZeRO-3", 4, offload=True),
)


TAKEN = ("one process", "DDP", "FSDP2", "FSDP2 + host")  # recommended is the first of these that fits


@dataclass(frozen=True)
class ScaleRow:
    """One strategy on one number of GPUs.

    Attributes:
        launch: file and flags for `accelerate launch`.
        device_bytes: on each GPU, with activations.
        fits: in the GPU's memory; None where that is not known.
        sent_bytes: by each GPU in an optimizer step.
        sending_s: what sending them takes at least, over the slowest link at its published bandwidth.
        host_bytes: of one machine's memory, where what is split lies there.
        why_not: why the plan of so many processes refuses the batch.
    """

    num_gpus: int
    strategy: str
    launch: str
    device_bytes: float
    fits: bool | None
    sent_bytes: float
    sending_s: float = 0.0
    host_bytes: float = 0.0
    why_not: str = ""


@dataclass(frozen=True)
class ScalePlan:
    """All rows, and which of them each number of GPUs should take; None where nothing is known to fit."""

    rows: list[ScaleRow]
    basis: list[str]
    taken: dict[int, ScaleRow | None] = field(default_factory=dict)


def plan_scale(facts: Facts, doctor: DoctorArguments) -> ScalePlan:
    """What the run of `facts` would take on each of `doctor.gpus`.

    Every GPU takes the micro-batch that the arguments ask for, so that a step reads more rows on more GPUs, unless
    `--effective_batch_size` is given: then passes shrink, and rows where they do not divide.
    """
    hardware = facts.machine.hardware
    if hardware.kind != "cuda" or facts.work is None or facts.plan is None:
        what = f"{hardware.name} is no GPU that it knows: add --device a100" if facts.work else "no model was read"
        return ScalePlan([], [f"none: {what}"])
    link = LINKS[usual_link(hardware) if doctor.gpu_link == "auto" else doctor.gpu_link]
    run = _Run(facts, doctor, link, LINKS[doctor.network])
    rows = [row for num_gpus in sorted(set(doctor.gpus)) for row in run.rows(num_gpus)]
    taken = {n: _choose([row for row in rows if row.num_gpus == n]) for n in sorted(set(doctor.gpus))}
    return ScalePlan(rows, run.basis(), taken)


def _choose(rows: list[ScaleRow]) -> ScaleRow | None:
    fitting = {row.strategy: row for row in rows if row.fits}
    return next((fitting[strategy] for strategy in TAKEN if strategy in fitting), None)


class _Run:
    """The run of `facts`, and what of it each number of GPUs computes and sends."""

    def __init__(self, facts: Facts, doctor: DoctorArguments, link: Link, network: Link):
        assert facts.work is not None
        assert facts.plan is not None
        self.facts, self.doctor, self.link, self.network = facts, doctor, link, network
        self.work, self.plan = facts.work, facts.plan
        cached = self.plan.applied("embedding_cache")
        self.present = [e for e in self.work.encoders if not (cached and e.training == "frozen")]
        self.shape = scaling.Shape(
            sum(encoder.num_parameters for encoder in self.present) + self.work.head_parameters,
            self.work.num_trainable,
            max(1, sum(encoder.num_layers for encoder in self.present)),
            sum(encoder.num_base for encoder in self.present) if self.plan.applied("lora_base") else 0,
        )
        self.half = self.plan.applied("precision")
        changed = self.plan["batch_size"].settings if self.plan.applied("batch_size") else {}
        self.passes = int(changed.get("gradient_accumulation_steps", facts.args.gradient_accumulation_steps))

    def rows(self, num_gpus: int) -> list[ScaleRow]:
        """One row per strategy; those that offload only where no other fits."""
        if num_gpus == 1:
            return [self._row(scaling.Layout("one process", 1, 1, self.half))]
        names = ["DDP", "FSDP2", "ZeRO-2", "ZeRO-3"] if self.facts.machine.hardware.native_bf16 else ["DDP"]
        rows = [self._row(scaling.Layout(name, num_gpus, num_gpus, self.half)) for name in names]
        if len(names) > 1 and not any(row.fits for row in rows):
            rows += [self._row(scaling.Layout(name, num_gpus, num_gpus, self.half, True)) for name in names[1::2]]
        return rows

    def _row(self, layout: scaling.Layout) -> ScaleRow:
        needed = scaling.state_bytes(layout, self.shape) + self.facts.step_bytes - self.facts.static_bytes
        room, num_gpus = self.facts.device_bytes, layout.num_processes
        passes, why_not = self._passes(num_gpus)
        sent = scaling.sent_bytes(scaling.transfers(layout, self.shape), passes)
        return ScaleRow(
            num_gpus,
            layout.strategy + (" + host" if layout.offload else ""),
            self._launch(layout),
            needed,
            None if room is None else needed <= room,
            sent,
            sent / ring_bandwidth(self.link, self.network, num_gpus, self.doctor.gpus_per_machine),
            scaling.host_bytes(layout, self.shape),
            why_not,
        )

    def _passes(self, num_gpus: int) -> tuple[int, str]:
        """Micro-batches of an optimizer step, and why the plan of as many processes refuses the batch, if it does."""
        args = self.facts.args
        if not args.effective_batch_size:
            return self.passes, ""
        assert self.plan.context is not None
        decision = batch_size.decide(dataclasses.replace(self.plan.context, world_size=num_gpus))
        if decision.status != "applied":
            return 1, decision.reason
        return int(decision.settings["gradient_accumulation_steps"]), ""

    def _launch(self, layout: scaling.Layout) -> str:
        """The nearest file, and the flags that make it this layout."""
        hardware, num_gpus = self.facts.machine.hardware, layout.num_processes
        machines = -(-num_gpus // self.doctor.gpus_per_machine)
        wanted = "bf16" if hardware.native_bf16 else "fp16"
        of_kind = [file for file in FILES if file.strategy == layout.strategy and file.precision == wanted]
        of_kind = [file for file in of_kind if file.offload == layout.offload] or of_kind
        if num_gpus == 1 and hardware.native_bf16:
            large = (hardware.memory_gib or 0) >= 75 and (hardware.compute_capability or (0, 0)) >= (9, 0)
            of_kind = [file for file in of_kind if file.name == ("1gpu_h100_bf16" if large else "1gpu_a100_bf16")]
        file = min(of_kind, key=lambda file: (abs(file.num_processes - num_gpus), file.num_processes))
        flags = [f"accelerate_configs/{file.name}.yaml"]
        if file.num_processes != num_gpus:
            flags.append(f"--num_processes {num_gpus}")
        if file.num_machines != machines:
            flags.append(f"--num_machines {machines}")
        if file.offload and not layout.offload:
            flags.append("--offload_param_device none --offload_optimizer_device none")
        if not self.half:
            flags.append("--mixed_precision no")
        return " ".join(flags)

    def basis(self) -> list[str]:
        """What the numbers rest on, and what they leave out."""
        args, card, machine = self.facts.args, self.facts.machine.hardware, self.doctor.gpus_per_machine
        lines = [f"between GPUs: {_describe(self.link)}; --gpu_link"]
        if max(self.doctor.gpus) > machine:
            lines.append(f"between machines of {machine} GPUs: {_describe(self.network)}; --network")
        batch = "the same rows per GPU, so N GPUs read N times the rows in a step"
        if args.effective_batch_size:
            batch = f"{args.effective_batch_size} rows per step on any number of GPUs"
        lines.append(batch + ("; --max_steps fixes the steps, not the rows" if args.max_steps > 0 else ""))
        lines.append("how long a step takes on several GPUs is not estimated: measure it with recipes/compare.py")
        if not card.native_bf16:
            lines.append(f"FSDP2 and ZeRO are left out: {card.name} has no bf16, in which their files compute")
        return lines


def _describe(link: Link) -> str:
    return f"{link.name}, {link.gb_per_second:g} GB/s ({link.source})"
