"""A few rows of a run as a batch, and a model on them: what parity and compilation are shown on.

Nothing that training depends on changes: modes, buffers and random numbers are afterwards as they were, and no gradient
stays.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import default_data_collator

from ...data import kept_random_states
from ...models import find_encoders, unwrap_peft
from ...processes import splits_weights
from ..base import Run

logger = logging.getLogger(__name__)

NUM_ROWS = 4
LABELS = ("label", "labels", "label_ids")  # that Trainer leaves in rows whatever the model takes
GRADIENT_LENGTHS = (160, 100)  # tokens: more than a block of 128 and less, and padding
MADE_UP_LENGTHS = (17, 33, 50, 64)  # tokens, where the data does not say how to make them
STATES = ("last_hidden_state", "logits")  # of what a model puts out, which is compared; else the first tensor


def first_rows(dataset: Any, is_spread: bool = False) -> list[Any]:
    """Takes up to `NUM_ROWS` rows; none of an iterator, which would lack them afterwards.

    Args:
        is_spread: from the first to the last where they are numbered: of sorted data, the first are alike.
    """
    if dataset is None or isinstance(dataset, Iterator):
        return []
    if not hasattr(dataset, "__len__"):
        return list(islice(iter(dataset), NUM_ROWS))
    last = len(dataset) - 1
    places = {last * i // (NUM_ROWS - 1) for i in range(NUM_ROWS)} if is_spread else range(min(NUM_ROWS, last + 1))
    return [dataset[i] for i in sorted(places)] if last >= 0 else []


def collate(model: Any, collator: Any, args: Any, rows: list[Any]) -> dict[str, Any]:
    """Makes a batch of rows, as Trainer does: without columns that the model's forward does not name."""
    if args.remove_unused_columns and isinstance(model, nn.Module) and all(isinstance(row, Mapping) for row in rows):
        named = (*inspect.signature(unwrap_peft(model).forward).parameters, *LABELS)
        is_text = hasattr(collator, "columns")  # which it reads itself
        rows = rows if is_text else [{key: value for key, value in row.items() if key in named} for row in rows]
    return dict((collator or default_data_collator)(rows))


def make_batch(run: Run, rows: list[Any]) -> dict[str, Any] | None:
    """Makes `rows` a batch of a run, on its device; None where there are none, or no batch can be made of them."""
    if not rows:
        return None
    try:
        with kept_random_states():
            return send_to_device(collate(run.model, run.collator, run.args, rows), run.args.device)
    except Exception:  # data and a collator of the user's own, which may only fit together in their trainer
        logger.debug("no batch at hand", exc_info=True)
        return None


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leaves each module in the mode it was in, and every buffer, such as a batch norm's means, as it was."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode, and at the end each module back in the one it was in."""
    with modes_kept(model):
        model.eval()
        yield


def draws_kept(device: torch.device | str) -> AbstractContextManager[None]:
    """Restores random states of `device` at the end: what a pass draws is none of the run's."""
    device = torch.device(device)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


# --- a model on a batch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A model in memory, and one batch of its data.

    Attributes:
        batch: arguments of its forward.
        autocast: dtype that training runs under; None for that of the weights.
    """

    module: nn.Module
    batch: dict[str, Any]
    autocast: torch.dtype | None

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def is_half(self) -> bool:
        """Whether the weights are stored in less than 32 bits."""
        dtype = next(weight.dtype for weight in self.module.parameters() if weight.is_floating_point())
        return torch.finfo(dtype).bits < 32

    @property
    def trains(self) -> bool:
        """Whether backward passes go through the model."""
        return any(weight.requires_grad for weight in self.module.parameters())

    def states(self, autocast: torch.dtype | None) -> Tensor:
        """Returns what the model puts out, (tokens or rows, width), float32; without padding where there is a mask."""
        states = _first_tensor(self._run(autocast))
        mask = self.batch.get("attention_mask")
        if isinstance(mask, Tensor) and states.dim() == 3 and mask.shape == states.shape[:2]:
            return states[mask.bool()].float()
        return states.reshape(-1, states.shape[-1] if states.dim() else 1).float()

    def loss(self) -> Tensor:
        """Computes the loss in float32, in which shows what reads padding.

        What the model puts out where it has none.
        """
        output = self._run(None)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        return (loss if isinstance(loss, Tensor) else _first_tensor(output)).float().nan_to_num()

    def _run(self, autocast: torch.dtype | None) -> Any:
        """Runs with the same random numbers each time, for models that draw while they evaluate."""
        with draws_kept(self.device):
            torch.manual_seed(0)
            with torch.autocast(self.device.type, autocast, enabled=autocast is not None):
                return self.module(**self.batch)

    def gradients(self, autocast: torch.dtype | None) -> Tensor:
        """Computes gradients of a fixed sum of states for embedded tokens of two short rows, (tokens, width), float32.

        Of an encoder; they come through the backward pass of every layer.
        """
        embedded: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        encoder: Any = self.module
        rows = [ids[mask.bool()] for ids, mask in zip(self.batch["input_ids"], self.batch["attention_mask"])]
        batch = pad_tokens([row[:length] for row, length in zip(rows, GRADIENT_LENGTHS)], encoder)
        handle = encoder.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                (found,) = torch.autograd.grad(_weigh(replace(self, batch=batch).states(autocast)), embedded)
        finally:
            handle.remove()
        return found[batch["attention_mask"].bool()].float()


def pad_tokens(rows: list[Tensor], encoder: Any) -> dict[str, Tensor]:
    """Pads token ids on the right; returns their mask, too."""
    pad_id = getattr(encoder.config, "pad_token_id", None) or 0
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def _weigh(states: Tensor) -> Tensor:
    """Sums values with a factor of its own for each: after a norm, a plain sum is constant."""
    return (states * torch.arange(1.0, states.numel() + 1, device=states.device).sin().view_as(states)).sum()


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = [output[name] for name in STATES if isinstance(output.get(name), Tensor)]
        output = named or [value for name, value in output.items() if name != "loss"] or [*output.values()]
    for value in output if isinstance(output, list | tuple) else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"no tensor is in what the model puts out ({type(output).__name__})")


def find_samples(run: Run) -> list[Sample]:
    """Finds one for each encoder with a packed path, on the first rows.

    An `AffinityModel` loads those that it references.

    None for an `AffinityModel` without rows, and where FSDP or DeepSpeed will shard the model: whole, it may not fit a
    device.
    """
    if run.args.fsdp or splits_weights(run.args):
        return []
    run.model.to(run.args.device)
    rows = first_rows(run.train_dataset)
    if hasattr(run.model, "attach_encoders"):
        return _tower_samples(run, rows)
    encoders = find_encoders(run.model)
    batch = make_batch(run, rows) or {} if encoders else {}
    return [Sample(encoder, _tokens(batch, encoder, run), training_dtype(run.args)) for encoder in encoders]


def sample_model(run: Run, rows: list[Any], autocast: torch.dtype | None) -> list[Sample]:
    """Samples a run's whole model on `rows`; none where that does not compute.

    Cost: the collator, and one forward pass without gradients.
    """
    if not isinstance(run.model, nn.Module) or not any(True for _ in run.model.parameters()):
        return []
    batch = make_batch(run, rows)
    if batch is None:
        return []
    if not run.args.use_cache and "use_cache" in inspect.signature(run.model.forward).parameters:
        batch["use_cache"] = False  # which Trainer sets in the configuration later
    sample = Sample(run.model.to(run.args.device), batch, autocast)
    try:
        with evaluating(run.model), torch.no_grad():
            sample.states(autocast)
    except Exception:  # a model and a loss of the user's own, which may lack what only their trainer gives them
        logger.debug("no pass at hand", exc_info=True)
        return []
    return [sample]


def training_dtype(args: Any) -> torch.dtype | None:
    """Returns what autocast computes in while training; None without."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def _tower_samples(run: Run, rows: list[Any]) -> list[Sample]:
    if not rows or not hasattr(run.collator, "encode_rows") or run.model.config.reads_vectors:
        return []
    run.model.attach_encoders()
    samples: dict[Any, Sample] = {}
    for name in run.model.embedding_sizes:
        index = run.model.tower_of(name).encoder
        inside = find_encoders(run.model.encoders[str(index)])
        if not inside:
            continue
        batch = send_to_device(run.collator.encode_rows(name, rows), run.args.device)
        frozen = run.model.config.encoder_specs[index].training == "frozen"
        autocast = run.model.encoder_autocast if frozen else training_dtype(run.args)
        samples.setdefault(index, Sample(inside[0], _given(batch), autocast))
    return list(samples.values())


def _given(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _tokens(batch: dict[str, Any], encoder: Any, run: Run) -> dict[str, Tensor]:
    """Returns ids and mask of a batch, or of made-up tokens where it has none that this encoder knows."""
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and int(ids.max()) < encoder.config.vocab_size:
        return _given(batch)
    generator = torch.Generator().manual_seed(0)
    highest = min(24, encoder.config.vocab_size)
    rows = [torch.randint(min(4, highest - 1), highest, (n,), generator=generator) for n in MADE_UP_LENGTHS]
    return send_to_device(pad_tokens(rows, encoder), run.args.device)
