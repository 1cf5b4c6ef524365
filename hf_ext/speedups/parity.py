"""Proof that a changed encoder still computes what it did: the first real rows through the old and the new one.

Bounds, on the last hidden states of real tokens:
- float32: the largest difference is at most 1e-4 of the largest state;
- autocast to bf16 or fp16: the new states are at most 1.5 times as far from the float32 result as the old ones were;
- weights stored in half precision: new and old states differ by at most 5 % (relative L2).
No weight may be replaced or re-initialised, and no dropout changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.packing import find_encoders
from .base import Run

NUM_ROWS = 4
MAX_DIFFERENCE = 1e-4
MAX_NOISE_RATIO = 1.5
MAX_HALF_DISTANCE = 0.05


@dataclass(frozen=True)
class Probe:
    """One encoder in memory, and real token ids (rows, width) with their mask to run it on."""

    encoder: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    autocast: torch.dtype | None

    @torch.no_grad()
    def states(self, autocast: torch.dtype | None) -> torch.Tensor:
        """Last hidden states of real tokens, (tokens, width), float32."""
        device = self.input_ids.device.type
        with torch.autocast(device, autocast, enabled=autocast is not None):
            output = self.encoder(input_ids=self.input_ids, attention_mask=self.attention_mask)
        return output.last_hidden_state[self.attention_mask.bool()].float()


@dataclass(frozen=True)
class Parity:
    """How far the new states are from the old ones.

    `max_difference` and `mean_difference`: absolute, in units of the states. `cosine`: the smallest over tokens.
    `noise_ratio`: distance to the float32 result, new over old, where the encoder runs under autocast.
    `problem`: what is above its bound, or None.
    """

    max_difference: float
    mean_difference: float
    cosine: float
    noise_ratio: float | None = None
    problem: str | None = None

    def evidence(self) -> dict[str, Any]:
        numbers = {name: float(f"{value:.3g}") for name, value in asdict(self).items() if isinstance(value, float)}
        return {**numbers, "cosine": round(self.cosine, 6)}


def prove(run: Run, change: Callable[[], Any]) -> Parity | None:
    """Makes `change` and compares; None if `run.model` has no encoder in memory to compare.

    Cost: two (float32) or three (autocast) forward passes over four rows. The encoders are moved to the run's device.
    """
    probes = find_probes(run)
    training = [(probe.encoder, probe.encoder.training) for probe in probes]
    for encoder, _ in training:
        encoder.eval()
    exact = [probe.states(None) for probe in probes]
    before = [probe.states(probe.autocast) if probe.autocast else states for probe, states in zip(probes, exact)]
    identity = {id(probe.encoder): identify(probe.encoder) for probe in probes}
    try:
        change()
        after = [probe.states(probe.autocast) for probe in probes]
    except (RuntimeError, ValueError, TypeError) as error:  # what kernels raise where they cannot run
        first_line = str(error).strip().splitlines()[0][:200]
        return Parity(0.0, 0.0, 1.0, problem=f"it does not run here ({type(error).__name__}: {first_line})")
    finally:
        for encoder, mode in training:
            encoder.train(mode)
    changed = [probe for probe in probes if identify(probe.encoder) != identity[id(probe.encoder)]]
    if changed:
        return Parity(0.0, 0.0, 1.0, problem="a weight was replaced or re-initialised, or a dropout changed")
    found = [compare(*states, probe) for *states, probe in zip(exact, before, after, probes)]
    return max(found, key=lambda parity: (parity.problem is not None, parity.max_difference), default=None)


def compare(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor, probe: Probe) -> Parity:
    """Judges `after` against `before`; `exact` is the float32 result where `probe` runs under autocast."""
    difference = (after - before).abs()
    cosine = nn.functional.cosine_similarity(after, before, dim=1).min().item()
    ratio, problem = None, None
    if probe.autocast:
        noise, allowed = (states.sub(exact).norm().item() for states in (after, before))
        allowed = max(allowed, 1e-3 * exact.norm().item())
        ratio = noise / allowed
        if not ratio <= MAX_NOISE_RATIO:
            problem = f"{ratio:.3g} times the rounding noise of the old one (bound {MAX_NOISE_RATIO})"
    elif before.numel() and probe.encoder.dtype != torch.float32:
        distance = (difference.norm() / before.norm()).item()
        if not distance <= MAX_HALF_DISTANCE:
            problem = f"states differ by {distance:.3g} (bound {MAX_HALF_DISTANCE})"
    elif not difference.max().item() <= MAX_DIFFERENCE * max(1.0, before.abs().max().item()):
        problem = f"states differ by {difference.max().item():.3g} (bound {MAX_DIFFERENCE})"
    return Parity(difference.max().item(), difference.mean().item(), cosine, ratio, problem)


def identify(encoder: nn.Module) -> dict[str, Any]:
    """What must not change: each weight (the object, and how often it was written to) and each dropout."""
    weights = {name: (id(weight), weight._version) for name, weight in encoder.named_parameters()}
    dropouts = {name: module.p for name, module in encoder.named_modules() if isinstance(module, nn.Dropout)}
    config = getattr(encoder, "config", None)
    settings = {name: value for name, value in vars(config).items() if "drop" in name} if config else {}
    return {"weights": weights, "dropouts": dropouts, "settings": settings}


def find_probes(run: Run) -> list[Probe]:
    """One probe per encoder with a packed path; an `AffinityModel` loads the encoders that it references."""
    run.model.to(run.args.device)
    if hasattr(run.model, "attach_encoders"):
        return _tower_probes(run)
    encoders = find_encoders(run.model)
    if not encoders:
        return []
    encoder = encoders[0]
    ids, mask = _first_tokens(run, encoder)
    return [Probe(encoder, ids.to(run.args.device), mask.to(run.args.device), _training_dtype(run))]


def _tower_probes(run: Run) -> list[Probe]:
    if run.collator is None or run.train_dataset is None:
        return []
    run.model.attach_encoders()
    rows = _first_rows(run.train_dataset)
    probes = {}
    for name in run.model.embedding_sizes:
        index = run.model.tower_of(name).encoder
        inside = find_encoders(run.model.encoders[str(index)])
        if not inside or index in probes:
            continue
        batch = run.collator.encode_rows(name, rows)
        frozen = run.model.config.encoder_specs[index].training == "frozen"
        autocast = run.model.encoder_autocast if frozen else _training_dtype(run)
        tokens = (batch[key].to(run.args.device) for key in ("input_ids", "attention_mask"))
        probes[index] = Probe(inside[0], *tokens, autocast)
    return list(probes.values())


def _first_rows(dataset: Any) -> list[Any]:
    rows: Iterable[Any] = dataset if not hasattr(dataset, "__len__") else map(dataset.__getitem__, range(len(dataset)))
    return list(islice(iter(rows), NUM_ROWS))


def _first_tokens(run: Run, encoder: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The first real rows as padded ids and mask; made-up ones where the data does not say how to make them."""
    rows = [] if run.train_dataset is None else _first_rows(run.train_dataset)
    if rows and hasattr(run.collator, "columns"):
        batch = run.collator(rows)
        return batch["input_ids"], batch["attention_mask"]
    generator = torch.Generator().manual_seed(0)
    lengths = [len(row["input_ids"]) for row in rows if "input_ids" in row] or [17, 33, 50, 64]
    ids = torch.randint(4, 24, (len(lengths), max(lengths)), generator=generator)
    for target, row in zip(ids, rows if rows and "input_ids" in rows[0] else []):
        target[: len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    pad = getattr(encoder.config, "pad_token_id", None) or 0
    return ids.clamp(max=encoder.config.vocab_size - 1).where(mask.bool(), torch.tensor(pad)), mask


def _training_dtype(run: Run) -> torch.dtype | None:
    return torch.bfloat16 if run.args.bf16 else torch.float16 if run.args.fp16 else None
