"""The ladder: what a run takes up, one after the other, where memory does not suffice, and leaves learning as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

ADVICE = (
    "What would help changes numbers or learning, so it is yours to choose, for a run that begins anew: --optim "
    "adamw_8bit, --use_peft (with --load_in_8bit or --load_in_4bit), --max_residues, a smaller model. Where there is "
    "more room, the same command with --resume auto goes on from the last checkpoint."
)

# A row's numbers depend on the others of its batch, and every forward pass changes their statistics.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Kind = Literal["top", "rows", "parts", "recompute", "host"]


@dataclass(frozen=True)
class Rung:
    """One state of a run's memory; each holds what those above it hold.

    Attributes:
        kind: "top": as asked for. "rows": at most `value` rows at a time. "parts": batches in `value` parts, where they
            vary in rows. "recompute": activations are recomputed, but for attention. "host": the optimizer's states are
            in host memory.
    """

    kind: Kind
    value: int = 0

    @property
    def text(self) -> str:
        """In words."""
        return {
            "top": "as asked for",
            "rows": f"{self.value} row{'s' if self.value > 1 else ''} at a time",
            "parts": f"batches in {self.value} parts",
            "recompute": "activations recomputed, but for attention",
            "host": "optimizer states in host memory",
        }[self.kind]

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"kind": self.kind, "value": self.value}


MOST_PARTS = 64  # of a batch whose rows vary


def make_rungs(rows: int | None, *, cuts: bool, recomputes: bool, to_host: bool) -> list[Rung]:
    """The rungs of a run from the top down, the same on all processes.

    Args:
        rows: of a batch on one device; None where they vary.
        cuts: whether batches may be computed in parts.
        recomputes: whether the model has layers that can be recomputed, and are not.
        to_host: whether the optimizer's states are on another device than the host's, and may go there.
    """
    rungs = [Rung("top")]
    if cuts and rows is None:
        rungs += [Rung("parts", 1 << i) for i in range(1, MOST_PARTS.bit_length())]
    while cuts and rows is not None and rows > 1:
        rows = -(-rows // 2)
        rungs.append(Rung("rows", rows))
    return rungs + [Rung("recompute")] * recomputes + [Rung("host")] * to_host


def find_depth(rungs: list[Rung], stored: dict[str, Any] | None) -> int:
    """How deep on `rungs` a run begins that was on the rung of which `stored` is the state.

    On the first rung that holds as much; a run whose batches are smaller already begins at the top.
    """
    if stored is None:
        return 0
    kind, value = stored["kind"], stored["value"]
    for depth, rung in enumerate(rungs):
        if rung.kind == kind and (kind not in ("rows", "parts") or _holds(rung, value)):
            return depth
    return 0


def _holds(rung: Rung, value: int) -> bool:
    return rung.value <= value if rung.kind == "rows" else rung.value >= value


def rows_each(rungs: list[Rung], depth: int, num_rows: int) -> int:
    """Rows of a batch of `num_rows` that are computed at a time on the rung at `depth`."""
    cutting = [rung for rung in rungs[: depth + 1] if rung.kind in ("rows", "parts")]
    if not cutting:
        return num_rows
    last = cutting[-1]
    return max(1, last.value if last.kind == "rows" else -(-num_rows // last.value))
