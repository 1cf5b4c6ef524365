"""All that was found out about a run before it starts, and what is off with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..checkpoints.retention import Sizes
from ..memory.report import MemoryReport
from ..plan import Plan
from .estimates import Rate, Schedule
from .machine import Machine
from .packages import Package
from .stage_estimates import StageEstimate
from .work import Work

Level = Literal["stops", "warns"]


@dataclass(frozen=True)
class Finding:
    """Something that is off. `level` "stops": the command would not run to its end; "warns": it would, but."""

    name: str
    level: Level
    text: str
    remedy: str


@dataclass(frozen=True)
class Facts:
    """What is known of machine, libraries, plan and work; what could not be found out stays empty.

    Attributes:
        task: "affinity", "masked_lm", "generation" or "pde_operator".
        args: `FastTrainingArguments`.
        save_full: frozen encoders are saved with the model.
        rate_basis: what the estimate of time rests on; empty where there is none, then `why_no_time` says why.
        rates: of each encoder, as `rate_basis` says.
        seconds: (what, (least, most)).
        memory: (what, bytes) on the device while training, by formula; `static_bytes` of them do not depend on the
            batch.
        forecast: the ledger's, from the model's own passes; or why there is none.
        encoding_bytes: frozen encoders' weights while they encode.
        output_bytes, embedding_bytes, download_bytes: most on disk, in the three folders of `Machine`.
        data: what reading the rows reported, as the run reports it; `labels`: what the run's audit says of training's.
        measure: which weights the run keeps, and what its verdict compares in; of affinity models alone.
        stages: of a generator, all three, whichever the command does; empty for others.
        problems: what reading data and model found.
        notes: what could not be found out, and why.
    """

    task: str
    args: Any
    machine: Machine
    packages: list[Package]
    plan: Plan | None = None
    work: Work | None = None
    save_full: bool = False
    schedule: Schedule | None = None
    rate_basis: str = ""
    why_no_time: str = ""
    rates: list[Rate] = field(default_factory=list)
    seconds: list[tuple[str, tuple[float, float]]] = field(default_factory=list)
    memory: list[tuple[str, int]] = field(default_factory=list)
    forecast: MemoryReport | str = ""
    static_bytes: int = 0
    step_bytes: int = 0
    encoding_bytes: int = 0
    checkpoint: Sizes | None = None
    output_bytes: int = 0
    embedding_bytes: int = 0
    download_bytes: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    stages: list[StageEstimate] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> dict[str, int]:
        """Most that the run puts into each of the machine's folders."""
        return {
            "output_dir": self.output_bytes,
            "cache_dir": self.embedding_bytes,
            "hub_cache": self.download_bytes,
        }

    @property
    def total_seconds(self) -> tuple[float, float] | None:
        """Least and most of the whole run."""
        if not self.seconds:
            return None
        return sum(least for _, (least, _) in self.seconds), sum(most for _, (_, most) in self.seconds)

    @property
    def device_bytes(self) -> int | None:
        """Memory that training may take: the card's, or what the host has free; None where not known."""
        hardware = self.machine.hardware
        if hardware.kind == "cpu":
            return round(self.machine.free_memory_gib * 2**30)
        if hardware.memory_gib is None:
            return None
        # Of a described card the nominal size is known; drivers report 91 % of it (T4, ECC on) or more.
        return round(hardware.memory_gib * 2**30 * (0.91 if self.machine.is_described else 1.0))
