"""Proof that a changed model still computes what it did: the first real rows through the old and the new one.

Encoders of packed families are compared one by one; any other model as a whole, by what it puts out
(`model_probe.py`).

Of encoders that train, gradients are compared too: those of the embedded tokens, which come through the backward pass
of every layer, of two rows cut to 160 and 100 tokens; of other models, those of the first repeated layer that trains.
Memory for them: about 1 GiB at 650M parameters.

Bounds, on the last hidden states of real tokens, in evaluation mode:
- float32: the largest difference is at most 1e-4, relative to the largest state where that is above 1 (always, of what
  other models put out, which may be small);
- autocast to bf16 or fp16: the new states are at most twice as far from the float32 result as the old ones were
  (L2; a distance of 0.1 % of that result counts as none);
- weights stored in half precision: new and old states differ by at most 5 % (relative L2).

The loss of a model around such an encoder, on rows from all over the data: the largest difference is 1e-4 of it (5 % of
weights in half precision). Packed encoders leave positions of padding empty, which a mean without the mask, or a label
there, would read.

Bounds on gradients:
- float32: relative L2 of at most 1 %. TF32, where it is on, rounds factors to 2^-11 of them; the roundings of 400
  products one after the other add up to their root, 20 x 2^-11 = 1 %. A lost or wrong term is far above it;
- autocast: at most twice as far from the float32 gradients as the old ones, as states are;
- weights stored in half precision: 5 %, as states.
Gradients that are not finite are only allowed where the old ones are not.
No weight may be replaced or re-initialised, and no dropout changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.packing import find_encoders
from ..zero import splits_weights
from .base import Run
from .model_probe import LossProbe, ModelProbe, evaluating, probe_model

NUM_ROWS = 4
MAX_DIFFERENCE = 1e-4
MAX_NOISE_RATIO = 2.0  # rounding scores too, as eager attention does, makes about 1.3
MAX_HALF_DISTANCE = 0.05
MAX_GRADIENT_DISTANCE = 0.01
GRADIENT_LENGTHS = (160, 100)  # tokens: more than a block of 128 and less, and padding
NOT_MEASURED = {"parity": "not measured: no whole encoder and rows at hand"}


@dataclass(frozen=True)
class Probe:
    """One encoder in memory, and real token ids (rows, width) with their mask to run it on."""

    encoder: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    autocast: torch.dtype | None
    least_scale: ClassVar[float] = 1.0  # of last states, which a norm has made of about that size

    def states(self, autocast: torch.dtype | None) -> torch.Tensor:
        """Last hidden states of real tokens, (tokens, width), float32."""
        device = self.input_ids.device.type
        with torch.autocast(device, autocast, enabled=autocast is not None):
            output = self.encoder(input_ids=self.input_ids, attention_mask=self.attention_mask)
        return output.last_hidden_state[self.attention_mask.bool()].float()

    @property
    def module(self) -> nn.Module:
        return self.encoder

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask.sum())

    @property
    def trains(self) -> bool:
        """Whether backward passes go through the encoder."""
        return any(parameter.requires_grad for parameter in self.encoder.parameters())

    def gradients(self, autocast: torch.dtype | None) -> torch.Tensor:
        """Of a fixed sum of states with respect to embedded tokens, (tokens, width), float32; none stays on weights."""
        embedded: list[torch.Tensor] = []

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        short = self._shortened()
        handle = self.encoder.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                states = short.states(autocast)
                # After a LayerNorm, a plain sum is constant: every value gets a weight of its own.
                weights = torch.arange(1.0, states.numel() + 1, device=states.device).sin().view_as(states)
                (found,) = torch.autograd.grad((states * weights).sum(), embedded)
        finally:
            handle.remove()
        return found[short.attention_mask.bool()].float()

    def _shortened(self) -> Probe:
        """Two rows cut to the lengths that gradients are compared at, padded right."""
        rows = [ids[mask.bool()] for ids, mask in zip(self.input_ids, self.attention_mask)]
        cut = [row[:length] for row, length in zip(rows, GRADIENT_LENGTHS)]
        ids = nn.utils.rnn.pad_sequence(cut, batch_first=True, padding_value=_pad_id(self.encoder))
        lengths = torch.tensor([len(row) for row in cut], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return replace(self, input_ids=ids, attention_mask=mask.long())


AnyProbe = Probe | ModelProbe


@dataclass(frozen=True)
class Parity:
    """How far the new states are from the old ones; no numbers where there are no new ones to compare.

    `max_difference` and `mean_difference`: absolute, in units of the states. `cosine`: the smallest over tokens.
    `noise_ratio`: distance to the float32 result, new over old, where the encoder runs under autocast.
    `gradient_distance`: new to old gradients, relative (L2); `gradient_noise_ratio`: as of states, under autocast.
    `problem`: what is above its bound, or None.
    """

    max_difference: float | None = None
    mean_difference: float | None = None
    cosine: float | None = None
    noise_ratio: float | None = None
    problem: str | None = None
    gradient_distance: float | None = None
    gradient_noise_ratio: float | None = None

    def evidence(self) -> dict[str, float]:
        """The numbers, with three digits; the cosine, which is close to 1, with six decimals."""
        numbers = {name: float(f"{value:.3g}") for name, value in asdict(self).items() if isinstance(value, float)}
        return numbers if self.cosine is None else {**numbers, "cosine": round(self.cosine, 6)}


@torch.no_grad()
def prove(run: Run, change: Callable[[], Any]) -> Parity | None:
    """Makes `change` and compares; None where there is nothing to compare (`find_probes`).

    Returns the comparison of the encoder that is furthest off. Undoing a change that has a `problem` is the caller's.
    Cost: two (float32) or three (autocast) forward passes over four rows, and as many backward passes over two where
    encoders train. The model is moved to the run's device.
    """
    probes = find_probes(run)
    probes += _loss_probe(run, probes)
    if any(isinstance(probe, LossProbe) and probe.has_labels_left_out for probe in probes):
        return Parity(problem="labels stand at positions that attention_mask leaves out")
    with _evaluating(probes):
        exact = [_measure(probe, None) for probe in probes]
        before = [_measure(probe, probe.autocast) if probe.autocast else found for probe, found in zip(probes, exact)]
        identity = [identify(probe.module) for probe in probes]
        try:
            change()
            after = [_measure(probe, probe.autocast) for probe in probes]
        except (RuntimeError, ValueError, TypeError, ImportError) as error:  # what kernels raise where they cannot run
            return Parity(problem=f"it does not run here ({one_line(error)})")
    if [identify(probe.module) for probe in probes] != identity:
        return Parity(problem="a weight was replaced or re-initialised, or a dropout changed")
    found = [_compare_both(*measured) for measured in zip(exact, before, after, probes)]
    return max(found, key=lambda parity: (parity.problem is not None, parity.max_difference), default=None)


def _measure(probe: AnyProbe, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States, and gradients where the encoder trains."""
    return probe.states(autocast), probe.gradients(autocast) if probe.trains else None


def _compare_both(exact: Any, before: Any, after: Any, probe: AnyProbe) -> Parity:
    states = judge_states(exact[0], before[0], after[0], probe)
    if states.problem and isinstance(probe, LossProbe):
        reads = "the loss reads positions that attention_mask leaves out (a mean without the mask?)"
        states = replace(states, problem=f"{reads}: {states.problem}")
    if before[1] is None:
        return states
    gradients = compare_gradients(exact[1], before[1], after[1], probe)
    numbers = {name: getattr(gradients, name) for name in ("gradient_distance", "gradient_noise_ratio")}
    return replace(states, **numbers, problem=states.problem or gradients.problem)


@contextmanager
def _evaluating(probes: list[AnyProbe]) -> Iterator[None]:
    """What is probed in evaluation mode, and then each module in the one it was in."""
    with ExitStack() as modes:
        for probe in probes:
            modes.enter_context(evaluating(probe.module))
        yield


def one_line(error: BaseException) -> str:
    """Type and first two lines of an error (torch's compilers name the cause in the second), 200 characters at most."""
    lines = " ".join(str(error).strip().splitlines()[:2])
    return f"{type(error).__name__}: {lines[:200]}" if lines else type(error).__name__


def judge_states(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor, probe: AnyProbe) -> Parity:
    """Judges `after` against `before`; `exact` is the float32 result where `probe` runs under autocast."""
    difference = (after - before).abs()
    cosine = nn.functional.cosine_similarity(after, before, dim=1).min().item()
    ratio, problem = None, None
    if probe.autocast:
        ratio = _noise_ratio(exact, before, after)
        if not ratio <= MAX_NOISE_RATIO:
            problem = _too_noisy(ratio)
    elif before.numel() and _is_half(probe.dtype):
        distance = (difference.norm() / before.norm()).item()
        if not distance <= MAX_HALF_DISTANCE:
            problem = f"states differ by {distance:.3g} (bound {MAX_HALF_DISTANCE})"
    elif not difference.max().item() <= MAX_DIFFERENCE * max(probe.least_scale, before.abs().max().item()):
        problem = f"states differ by {difference.max().item():.3g} (bound {MAX_DIFFERENCE})"
    return Parity(difference.max().item(), difference.mean().item(), cosine, ratio, problem)


def compare_gradients(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor, probe: AnyProbe) -> Parity:
    """Judges gradients `after` against `before`; `exact` are those in float32 where `probe` runs under autocast."""
    if not before.isfinite().all():  # they overflow in the training dtype: no kernel's doing
        return Parity()
    distance = ((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)).item()
    if not probe.autocast:
        bound = MAX_HALF_DISTANCE if _is_half(probe.dtype) else MAX_GRADIENT_DISTANCE
        problem = None if distance <= bound else f"gradients differ by {distance:.3g} (bound {bound})"
        return Parity(gradient_distance=distance, problem=problem)
    ratio = _noise_ratio(exact, before, after)
    problem = None if ratio <= MAX_NOISE_RATIO else _too_noisy(ratio) + ", in gradients"
    return Parity(gradient_distance=distance, gradient_noise_ratio=ratio, problem=problem)


def _is_half(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < 32


def _noise_ratio(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    """How much further from `exact` than `before` `after` is; 0.1 % of `exact` counts as no distance."""
    noise, allowed = (found.sub(exact).norm().item() for found in (after, before))
    return noise / max(allowed, 1e-3 * exact.norm().item())


def _too_noisy(ratio: float) -> str:
    return f"{ratio:.3g} times the rounding noise of the old one (bound {MAX_NOISE_RATIO})"


def identify(encoder: nn.Module) -> dict[str, Any]:
    """What must not change: each weight (the object, and how often it was written to) and each dropout."""
    weights = {name: (id(weight), weight._version) for name, weight in encoder.named_parameters()}
    dropouts = {name: module.p for name, module in encoder.named_modules() if isinstance(module, nn.Dropout)}
    of_scores = {name: getattr(module, "dropout", None) for name, module in encoder.named_modules()}
    dropouts |= {f"{name}.dropout": p for name, p in of_scores.items() if isinstance(p, float)}
    config = getattr(encoder, "config", None)
    settings = {name: value for name, value in vars(config).items() if "drop" in name} if config else {}
    return {"weights": weights, "dropouts": dropouts, "settings": settings}


def find_probes(run: Run) -> list[AnyProbe]:
    """One probe per encoder with a packed path, and of a model without any the whole; see `Probe` and `ModelProbe`.

    An `AffinityModel` loads the encoders that it references.

    No probe for an `AffinityModel` without rows, and where FSDP or DeepSpeed will shard the model: whole, it may not
    fit a device.
    """
    if run.args.fsdp or splits_weights(run.args):
        return []
    run.model.to(run.args.device)
    if hasattr(run.model, "attach_encoders"):
        return _tower_probes(run)
    autocast = _training_dtype(run)
    tokens = ((encoder, *_first_tokens(run, encoder)) for encoder in find_encoders(run.model))
    found: list[AnyProbe] = [Probe(encoder, ids, mask, autocast) for encoder, ids, mask in tokens]
    if found:
        return found
    whole = probe_model(run, first_rows(run.train_dataset), autocast)
    return [whole] if whole else []


def _loss_probe(run: Run, probes: list[AnyProbe]) -> list[AnyProbe]:
    """The model around the encoders of `probes`; towers of an `AffinityModel` read nothing of padding."""
    if not probes or hasattr(run.model, "attach_encoders") or not all(isinstance(probe, Probe) for probe in probes):
        return []
    whole = probe_model(run, _rows_from_everywhere(run.train_dataset), None)
    return [LossProbe(whole.module, whole.batch, None)] if whole else []


def _tower_probes(run: Run) -> list[AnyProbe]:
    rows = first_rows(run.train_dataset)
    if not rows or not hasattr(run.collator, "encode_rows"):
        return []
    run.model.attach_encoders()
    probes: dict[Any, AnyProbe] = {}
    for name in run.model.embedding_sizes:
        index = run.model.tower_of(name).encoder
        inside = find_encoders(run.model.encoders[str(index)])
        if not inside or index in probes:
            continue
        batch = run.collator.encode_rows(name, rows)
        frozen = run.model.config.encoder_specs[index].training == "frozen"
        autocast = run.model.encoder_autocast if frozen else _training_dtype(run)
        ids, mask = (batch[key].to(run.args.device) for key in ("input_ids", "attention_mask"))
        probes[index] = Probe(inside[0], ids, mask, autocast)
    return list(probes.values())


def first_rows(dataset: Any) -> list[Any]:
    """Up to four rows; none of an iterator, which would lack them afterwards."""
    if dataset is None or isinstance(dataset, Iterator):
        return []
    rows: Iterable[Any] = dataset if not hasattr(dataset, "__len__") else map(dataset.__getitem__, range(len(dataset)))
    return list(islice(iter(rows), NUM_ROWS))


def _rows_from_everywhere(dataset: Any) -> list[Any]:
    """As `first_rows`, and from the first to the last: where data is sorted, the first are equally long, or alike."""
    if dataset is None or isinstance(dataset, Iterator) or not hasattr(dataset, "__len__"):
        return first_rows(dataset)
    last = len(dataset) - 1
    places = {last * i // (NUM_ROWS - 1) for i in range(NUM_ROWS)} if last >= 0 else set()
    return [dataset[place] for place in sorted(places)]


def _first_tokens(run: Run, encoder: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The first real rows as padded ids and mask; made-up ones where the data does not say how to make them."""
    rows, device = first_rows(run.train_dataset), run.args.device
    if rows and hasattr(run.collator, "columns"):
        batch = run.collator(rows)
        return batch["input_ids"].to(device), batch["attention_mask"].to(device)
    known = [row["input_ids"] for row in rows if isinstance(row, Mapping) and "input_ids" in row]
    generator = torch.Generator().manual_seed(0)
    made_up = [torch.randint(4, 24, (length,), generator=generator) for length in (17, 33, 50, 64)]
    sequences = [torch.as_tensor(ids).clamp(max=encoder.config.vocab_size - 1) for ids in known or made_up]
    lengths = torch.tensor([len(ids) for ids in sequences])
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=_pad_id(encoder))
    return padded.to(device), (torch.arange(padded.shape[1]) < lengths[:, None]).long().to(device)


def _pad_id(encoder: PreTrainedModel) -> int:
    return getattr(encoder.config, "pad_token_id", None) or 0


def _training_dtype(run: Run) -> torch.dtype | None:
    return torch.bfloat16 if run.args.bf16 else torch.float16 if run.args.fp16 else None
