"""A look at the first rows that train, and at what a loss that is not ours does with them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from ..data.batch_parts import copy_batch
from ..data.random_states import kept_random_states
from ..errors import DataError
from ..speedups.sample_rows import modes_kept
from .first_look import shorten, without_compiling

NUM_FIRST_ROWS = 16
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "labels"}  # beside other inputs, one text may be right
_REMEDY = "Many tokenizers for proteins want blanks between residues, ' '.join(sequence), others want capitals."

logger = logging.getLogger(__name__)


class FirstStep(TrainerCallback):
    """Looks at the first rows, and, where the loss is somebody else's, at what it does in the first step of a run.

    Such a loss is a `compute_loss_func`, that of a subclass of the trainer, or of a model class from elsewhere. Warned
    of are weights that it does not reach, and, where steps are split, a loss that Trainer takes for a share of the
    step's and that is a mean: it is the same for twice as many items.

    Cost: one read from the device for each of the first batches; of such a loss one more forward pass, where steps are
    split, and one read per weight.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._rows: list[tuple[tuple[int, ...], str, str]] = []  # ids, labels and all inputs
        self._is_first = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run was looked at when it began."""
        self._is_first = state.global_step == 0

    def see(self, batch: Any) -> None:
        """Warns where the first rows are nearly all alike in token ids: a tokenizer may not know their text.

        Raises:
            DataError: all have the same ids (mask, types), but not the same labels, and there is no other input.
        """
        ids, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "labels"))
        is_later = (self._trainer.state.epoch or 0) >= 1  # the same rows again
        if is_later or len(self._rows) >= NUM_FIRST_ROWS or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        tokenizer: Any = self._trainer.processing_class or getattr(self._trainer.data_collator, "tokenizer", None)
        unknown, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "pad"))
        told = labels.tolist() if isinstance(labels, torch.Tensor) and labels.dim() else [""] * len(ids)
        beside = [batch.get(name, ids).tolist() for name in ("attention_mask", "token_type_ids")]
        for label, *columns in zip(told, ids.tolist(), *beside):
            tokens = [values for values in zip(*columns) if values[0] != pad]
            self._rows.append((tuple(token for token, *_ in tokens), str(label), str(tokens)))
        if len(self._rows) < NUM_FIRST_ROWS:
            return
        rows, answers, inputs = zip(*self._rows)
        special = {*getattr(tokenizer, "all_special_ids", ())} - {unknown}
        is_unknown = [token == unknown for row in rows for token in row if token not in special]
        share = sum(is_unknown) / max(1, len(is_unknown))
        said = []
        if share > 0.5:
            said.append(f"{share:.0%} of the tokens of the first {len(rows)} rows are {tokenizer.unk_token!r}")
        ((given, times),) = Counter(inputs).most_common(1)
        if set(batch) <= _TEXT and len(set(answers)) > 1 and times > 0.9 * len(rows):
            ids = [*rows[inputs.index(given)][:8]]
            said.append(f"{times} of the first {len(rows)} rows have the same token ids {ids}, not the same labels")
            if times == len(rows):
                raise DataError(f"{'; '.join(said)}: nothing can be learned. {_REMEDY}")
        if said:
            logger.warning("%s. %s", "; ".join(said), _REMEDY)

    def check_share(self, inputs: Any, compute: Callable[..., Any], num_items: Any) -> None:
        """Warns of a loss that Trainer adds up over a step's batches and that does not change with the number of items.

        Args:
            compute: the loss of a batch, given `num_items_in_batch`; called twice, with the same random numbers.
        """
        if not self._is_first:
            return
        self._is_first = False
        trainer = self._trainer
        args, loss = trainer.args, trainer._ext_decided_loss()
        num_parts = args.gradient_accumulation_steps * (args.world_size if args.average_tokens_across_devices else 1)
        is_split = num_parts > 1 and num_items is not None and not trainer._ext_backend.is_spread
        if not (is_split and loss.is_foreign and loss.is_said_to_divide):
            return
        values = []
        for number in (num_items, 2 * num_items):
            draws = kept_random_states(trainer, trainer.compute_loss_func)
            with draws, torch.no_grad(), modes_kept(trainer.model), without_compiling(trainer):
                values.append(compute(copy_batch(inputs), num_items_in_batch=number))
        trainer.throughput.begin_again()
        if torch.is_tensor(values[0]) and torch.equal(*values) and values[0].any():
            logger.warning(
                "%s does not change with num_items_in_batch, and Trainer adds up the losses of a step's %d batches: if "
                "it is a mean, gradients are %d times too large. Divide a sum by num_items_in_batch.",
                *(loss.name, num_parts, num_parts),
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Names weights that the loss does not reach."""
        trainer = self._trainer
        if state.global_step > 0 or trainer._ext_backend.is_spread:
            return
        loss = trainer._ext_decided_loss()
        if not loss.is_foreign:
            return
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if not any(gradient.any() for gradient in gradients.values() if gradient is not None):
            logger.warning(
                "%s does not change with any of the %d trainable parameters in the first step: on such rows training "
                "changes nothing. Compute it from the outputs with torch operations: .item(), .detach(), numpy and "
                "torch.no_grad() cut it off.",
                *(loss.name, len(gradients)),
            )
        elif missing:
            logger.warning("%d trainable parameters get no gradient from the loss: %s.", len(missing), shorten(missing))
