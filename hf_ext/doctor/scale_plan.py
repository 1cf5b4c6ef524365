"""What a run would take on 1, 2, 4, ... GPUs: memory, communication, efficiency, time, money, and the launcher file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..speedups import batch_size
from ..speedups.base import Decision
from . import scaling
from .arguments import DoctorArguments
from .estimates import count_flops, estimate_seconds, money
from .facts import Facts
from .links import LINKS, MESSAGE_SECONDS, Link, ring_bandwidth, usual_link

Span = tuple[float, float]


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


# Recommended is the first of these that fits and whose worst case is not much slower than the best one's.
TAKEN = ("one process", "DDP", "FSDP2", "FSDP2 + host")
NOT_MUCH_SLOWER = 1.15


@dataclass(frozen=True)
class ScaleRow:
    """One strategy on one number of GPUs. None where it is not known; `why_not` says why, if the row has no times.

    Attributes:
        launch: file and flags for `accelerate launch`.
        device_bytes: on each GPU, with activations.
        fits: in the GPU's memory.
        sent_bytes: by each GPU in an optimizer step.
        communication_s, compute_s: of an optimizer step, (least, most).
        without_overlap, with_overlap: share of a step that is compute, (least, most); 1 is N times as fast as one GPU.
        seconds: of the run, between all that goes well and all that does not.
        dollars: of all GPUs together.
    """

    num_gpus: int
    strategy: str
    launch: str
    device_bytes: float
    fits: bool | None
    sent_bytes: float
    host_bytes: float = 0.0
    communication_s: Span | None = None
    compute_s: Span | None = None
    without_overlap: Span | None = None
    with_overlap: Span | None = None
    seconds: Span | None = None
    dollars: Span | None = None
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
    `--effective_batch_size` or `--max_tokens_per_step` is given: then passes shrink, and rows where they do not divide.
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
    fitting = [row for row in rows if row.fits and row.strategy in TAKEN]
    best = min((row.seconds[1] for row in fitting if row.seconds), default=0.0)
    return next((row for row in fitting if not row.seconds or row.seconds[1] <= NOT_MUCH_SLOWER * best), None)


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
        self.why_no_time = facts.why_no_time
        if not self.why_no_time:
            self._split_time()

    def _split_time(self) -> None:
        """Seconds of one GPU, apart: encoding once, one micro-batch, all evaluations."""
        schedule, facts = self.facts.schedule, self.facts
        assert schedule is not None
        unevaluated = dataclasses.replace(schedule, evaluations=0)
        training = estimate_seconds(self.plan, self.work, unevaluated, facts.rates)[-1][1]
        *encoding, (_, whole) = facts.seconds
        self.once = encoding[0][1] if encoding else (0.0, 0.0)
        self.evaluating = (whole[0] - training[0], whole[1] - training[1])
        num_passes = schedule.steps * self.work.num_heads
        self.per_pass = (training[0] / num_passes, training[1] / num_passes)
        self.num_steps = num_passes / self.passes

    @property
    def backward_share(self) -> float:
        """Of the FLOPs of training; 2/3 where all trains."""
        head = 2.0 * self.work.head_parameters * self.work.num_rows["train"]
        forward = sum(count_flops(encoder.forward_flops, encoder.train) for encoder in self.present) + head
        return 1 - forward / (sum(count_flops(encoder.flops, encoder.train) for encoder in self.present) + 3 * head)

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
        room, parts = self.facts.device_bytes, scaling.transfers(layout, self.shape)
        steps, passes, share = self._steps(layout.num_processes)
        row = ScaleRow(
            layout.num_processes,
            layout.strategy + (" + host" if layout.offload else ""),
            self._launch(layout),
            needed,
            None if room is None else needed <= room,
            scaling.sent_bytes(parts, passes or 1),
            scaling.host_bytes(layout, self.shape),
        )
        if passes is None:
            return dataclasses.replace(row, why_not=self._batch(layout.num_processes).reason)
        if layout.offload:
            return dataclasses.replace(row, why_not="what PCIe and the CPU take is not modelled")
        if self.why_no_time:
            return dataclasses.replace(row, why_not=self.why_no_time)
        return dataclasses.replace(row, **self._times(layout, parts, steps, passes, share))

    def _batch(self, num_gpus: int) -> Decision:
        """What the plan of as many processes decides about rows and passes."""
        assert self.plan.context is not None
        return batch_size.decide(dataclasses.replace(self.plan.context, world_size=num_gpus))

    def _steps(self, num_gpus: int) -> tuple[float, int | None, float]:
        """Optimizer steps of the run, passes of one (None where the plan refuses the batch), and what a pass computes
        as a share of one GPU's pass."""
        args, steps = self.facts.args, getattr(self, "num_steps", 0.0)
        if not (args.effective_batch_size or args.max_tokens_per_step):
            return steps if args.max_steps > 0 else steps / num_gpus, self.passes, 1.0
        decision = self._batch(num_gpus)
        if decision.status != "applied":
            return steps, None, 1.0
        passes = int(decision.settings["gradient_accumulation_steps"])
        return steps, passes, self.passes / (num_gpus * passes)

    def _times(
        self, layout: scaling.Layout, parts: list[scaling.Transfer], steps: float, passes: int, share: float
    ) -> dict[str, Any]:
        compute = (self.per_pass[0] * passes * share, self.per_pass[1] * passes * share)
        slow, fast = ring_bandwidth(self.link, self.network, layout.num_processes, self.doctor.gpus_per_machine)
        sending = (
            scaling.communication_seconds(parts, fast, MESSAGE_SECONDS[0], passes),
            scaling.communication_seconds(parts, slow, MESSAGE_SECONDS[1], passes),
        )
        hidden = [scaling.hideable_seconds(layout.strategy, value, self.backward_share, passes) for value in compute]
        bare, (_, slowest) = _combine(compute, sending)
        overlapped, (fastest, _) = _combine(compute, sending, (hidden[0], hidden[1]))
        rest = [(self.once[i] + self.evaluating[i]) / layout.num_processes for i in (0, 1)]
        seconds = (rest[0] + steps * fastest, rest[1] + steps * slowest)
        price = self.facts.args.dollars_per_hour
        return {
            "communication_s": sending,
            "compute_s": compute,
            "without_overlap": bare,
            "with_overlap": overlapped,
            "seconds": seconds,
            "dollars": money(seconds, None if price is None else price * layout.num_processes),
        }

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
        slow, fast = (value / 1e9 for value in ring_bandwidth(self.link, self.network, 1, machine))
        lines = [
            f"compute: {self.facts.rate_basis or self.why_no_time}",
            f"between GPUs: {self.link.name}, {self.link.gb_per_second:g} GB/s ({self.link.source}), of which "
            f"{slow:.3g} to {fast:.3g} are assumed to be reached; --gpu_link",
        ]
        if max(self.doctor.gpus) > machine:
            slow, fast = (value / 1e9 for value in ring_bandwidth(self.link, self.network, machine + 1, machine))
            lines.append(
                f"between machines of {machine} GPUs: {self.network.name}, {self.network.gb_per_second:g} GB/s "
                f"({self.network.source}), a ring reaches {slow:.3g} to {fast:.3g} GB/s (assumed); --network"
            )
        batch = "the same rows per GPU, so N GPUs read N times the rows in a step"
        if args.effective_batch_size:
            batch = f"{args.effective_batch_size} rows per step on any number of GPUs"
        if args.max_tokens_per_step:
            batch = f"at most {args.max_tokens_per_step} tokens per step on any number of GPUs"
        lines.append(batch + ("; --max_steps fixes the steps, not the rows" if args.max_steps > 0 else ""))
        lines.append("rows of unequal length, data loading, checkpoints and start-up are left out")
        if not card.native_bf16:
            lines.append(f"FSDP2 and ZeRO are left out: {card.name} has no bf16, in which their files compute")
        return lines


def _combine(compute: Span, sending: Span, hideable: Span = (0.0, 0.0)) -> tuple[Span, Span]:
    """Share of a step that is compute, and seconds of a step, over every pair of the two spans: (least, most) each."""
    pairs = [(c, scaling.step_seconds(c, s, hidden)) for c, hidden in zip(compute, hideable) for s in sending]
    shares, seconds = [c / step for c, step in pairs], [step for _, step in pairs]
    return (min(shares), max(shares)), (min(seconds), max(seconds))
