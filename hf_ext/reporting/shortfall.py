"""Whether a run is slower than its card should be, and the likely cause: a function of what was measured alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .rates import Device

# Share of the published dense peak that whole encoders reach. Assumed, not measured here: wide ones as in PaLM (46 %,
# arXiv:2204.02311, table 3) down to what plain PyTorch reaches; products of width 512 and less do about as many FLOPs
# per byte as a card's memory can feed (width / 2), so they wait for it.
UTILISATION = {"wide": (0.15, 0.45), "narrow": (0.03, 0.20)}
NARROW_WIDTH = 512
MUCH_WAITING = 0.2  # of the time of a step
PROFILE = "--torch_profiler 5 shows where the time goes"


@dataclass(frozen=True)
class SpeedFacts:
    """What was measured of the last steps of a run; see `find_shortfall`.

    Attributes:
        device: with the precision of the run's products.
        rates: `data_wait_share`, and where encoders run `residues_per_s` or `tokens_per_s`, and `mfu`.
        width: of the widest encoder; None where that is not known.
    """

    device: Device
    rates: Mapping[str, float]
    width: int | None = None


@dataclass(frozen=True)
class Shortfall:
    """`causes` are short names, each with a sentence that ends in what to try; `claim` is what a card falls short of.

    On a CPU, of which nobody published what it should reach, there is no claim.
    """

    claim: str
    causes: tuple[tuple[str, str], ...]

    @property
    def names(self) -> str:
        """The causes in a few words."""
        return ", ".join(name for name, _ in self.causes) or "cause not known"

    def __str__(self) -> str:
        causes = "; ".join(text for _, text in self.causes)
        if not self.claim:
            return causes
        return f"{self.claim}, because {causes}" if causes else f"{self.claim}: why is not known, {PROFILE}"


def find_shortfall(facts: SpeedFacts) -> Shortfall | None:
    """What to say of a run's speed; None where nothing is known to be wrong.

    Of a card something is claimed where model FLOPs utilisation is below what is usual, or where a cause that always
    costs time is there. Heads on cached embeddings are too small for the first.
    """
    hardware, causes = facts.device.hardware, [*_certain_causes(facts)]
    if hardware.kind not in ("cuda", "rocm"):
        return Shortfall("", tuple(causes)) if causes else None
    evidence = _evidence(facts)
    if not (evidence or causes):
        return None
    return Shortfall(f"below what this {hardware.name} should reach{evidence}", tuple(causes))


def _runs_encoders(facts: SpeedFacts) -> bool:
    return "residues_per_s" in facts.rates or "tokens_per_s" in facts.rates


def _evidence(facts: SpeedFacts) -> str:
    if not _runs_encoders(facts):
        return ""
    low, high = UTILISATION["wide" if (facts.width or 0) > NARROW_WIDTH else "narrow"]
    mfu = facts.rates.get("mfu")
    if mfu is not None and mfu < low:
        return f" ({mfu:.1%} of its {facts.device.dtype} peak, where {low:.0%} to {high:.0%} is usual)"
    return ""


def _certain_causes(facts: SpeedFacts) -> Iterator[tuple[str, str]]:
    hardware, dtype = facts.device.hardware, facts.device.dtype
    waiting = facts.rates.get("data_wait_share", 0.0)
    if waiting >= MUCH_WAITING:
        remedy = "" if hardware.kind == "cpu" else " (more --dataloader_num_workers)"  # which want cores, too
        yield "waiting for data", f"it waits for data {waiting:.0%} of the time{remedy}"
    if hardware.kind == "cuda" and dtype == "bf16" and not hardware.native_bf16:
        other = "--fp16 true" if hardware.native_fp16 else "float32"
        yield "emulated bf16", f"{hardware.name} emulates bf16 ({other} in its place)"
    is_half_better = hardware.kind == "cuda" and (hardware.native_bf16 or hardware.native_fp16)
    if is_half_better and dtype in ("fp32", "tf32") and _runs_encoders(facts):
        yield "float32", f"it computes in {dtype} (--{'bf16' if hardware.native_bf16 else 'fp16'} true)"


def encoder_width(model: Any) -> int | None:
    """Of the widest encoder of a model; None where its configuration does not say."""
    if sizes := getattr(model, "embedding_sizes", None):
        return max(sizes.values())
    config = getattr(model, "config", None)
    return getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
