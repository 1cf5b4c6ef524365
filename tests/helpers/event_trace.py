"""What a run does, in order: seams of Trainer, callback events, checkpoint operations, and the names it logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from hf_ext.checkpoints.agreement import hyperparameters
from hf_ext.checkpoints.format import trees
from hf_ext.checkpoints.retention import rotation
from hf_ext.checkpoints.state import finite, rng, steppers, weights
from hf_ext.checkpoints.storage.staging import Staging
from hf_ext.checkpoints.storage.store import CheckpointStore
from hf_ext.evaluation import dataset_subset, stopping_rule

# Methods of Trainer that hf_ext takes part in; see `test_seams.py` for their signatures.
SEAMS = (
    "train create_accelerator_and_postprocess init_hf_repo _inner_training_loop set_initial_training_values",
    "_get_dataloader create_optimizer create_scheduler _prepare_for_training _init_training_state",
    "_load_from_checkpoint _load_optimizer_and_scheduler _load_scaler _load_rng_state",
    "_run_epoch get_batch_samples _get_num_items_in_batch training_step _prepare_inputs compute_loss _get_grad_norm",
    "_maybe_log_save_evaluate log _evaluate evaluate evaluation_loop prediction_step _determine_best_metric",
    "_save_checkpoint save_model _save _save_optimizer_and_scheduler save_state",
    "_finalize_training _load_best_model push_to_hub end",
)
WORK: tuple[Callable[..., Any], ...] = (
    *(getattr(CheckpointStore, name) for name in ("adopt", "stage", "find_newest", "open", "take_in", "make_way")),
    *(getattr(CheckpointStore, name) for name in ("set_aside", "set_aside_after", "delete", "strip", "sweep")),
    Staging.abandon,
    finite.not_finite,
    hyperparameters.apply_changes,
    rng.restore_rng,
    rotation.plan_cleanup,
    rotation.plan_save,
    steppers.load_optimizer_tree,
    steppers.load_scheduler_tree,
    steppers.optimizer_tree,
    trees.save_tree,
    weights.load_weights,
    weights.save_weights,
    dataset_subset.choose_rows,
    stopping_rule.StoppingRule.update,
)


def _labels() -> dict[CodeType, str]:
    seams = {unwrap(getattr(Trainer, name)).__code__: f"Trainer.{name}" for name in " ".join(SEAMS).split()}
    work = {unwrap(function).__code__: function.__qualname__ for function in WORK}
    return {**seams, **work, CallbackHandler.call_event.__code__: "event"}


def _describe(label: str, values: dict[str, Any]) -> str:
    if label == "event":
        return f"event {values['event']}"
    if label == "Trainer.log":
        return f"{label} {' '.join(sorted(values['logs']))}"
    if label == "save_tree":
        return f"{label} {values['name']}"
    if label in ("CheckpointStore.stage", "CheckpointStore.delete", "CheckpointStore.strip", "CheckpointStore.take_in"):
        return f"{label} {values['step']}"
    return label


@contextmanager
def traced() -> Iterator[list[str]]:
    """Notes, while it lasts, what this thread enters. Patches nothing: an override is one for hf_ext, too."""
    labels, trace = _labels(), []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in labels:
            trace.append(_describe(labels[frame.f_code], frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield trace
    finally:
        sys.setprofile(before)


def fold(trace: list[str]) -> list[str]:
    """With a line and its repetitions as one, 'x 3'."""
    folded: list[tuple[str, int]] = []
    for line in trace:
        if folded and folded[-1][0] == line:
            folded[-1] = (line, folded[-1][1] + 1)
        else:
            folded.append((line, 1))
    return [line if number == 1 else f"{line} x {number}" for line, number in folded]
