"""Data loading that keeps the device busy: workers from the cores there are, pinned memory, asynchronous copies.

Class I. Effect: batches are tokenized while the device computes, and copied while it computes.
Hardware: workers pay where there are cores left over; pinning and non-blocking copies only with a GPU. With cached
embeddings a batch is a table look-up in this process, and workers would only add copies.
"""

from __future__ import annotations

from .base import Context, Decision, Kind, Run, off

NAME = "data_loading"
KIND: Kind = "I"
MAX_WORKERS = 8
PREFETCH_FACTOR = 4


def decide(context: Context) -> Decision:
    """Leaves alone every field that the user set."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    on_gpu = context.hardware.kind == "cuda"
    workers = 0 if context.caches_all_inputs else _num_workers(context, on_gpu)
    settings: dict[str, object] = {
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": on_gpu,
        "dataloader_persistent_workers": workers > 0,
        "dataloader_prefetch_factor": PREFETCH_FACTOR if workers else None,
        "non_blocking": on_gpu,
    }
    settings = {name: value for name, value in settings.items() if not context.user_set(name)}
    why = "batches are look-ups in the embedding cache" if context.caches_all_inputs else f"{context.cpu_cores} cores"
    reason = f"{workers} workers ({why}), pinned memory {'on' if on_gpu else 'off'}"
    return Decision(NAME, KIND, "applied", reason, settings)


def _num_workers(context: Context, on_gpu: bool) -> int:
    # On a CPU the cores do the training; tokenization by table look-up takes well under 1 % of a step.
    per_process = context.cpu_cores // max(1, context.world_size)
    return min(MAX_WORKERS, max(0, per_process - 1)) if on_gpu else 0


def apply(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's own fields; `non_blocking` goes to Accelerate."""
    for name, value in decision.settings.items():
        if name == "non_blocking":
            run.args.accelerator_config.non_blocking = value
        else:
            setattr(run.args, name, value)
    return decision
