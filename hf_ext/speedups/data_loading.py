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
    """Leaves alone every field that the user set, and pinning where something switched it off."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    on_gpu = context.hardware.kind == "cuda"
    pinned = on_gpu and context.args.dataloader_pin_memory
    workers, why = _num_workers(context, on_gpu)
    settings: dict[str, object] = {
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": pinned,
        "dataloader_persistent_workers": workers > 0,
        "dataloader_prefetch_factor": PREFETCH_FACTOR if workers else None,
    }
    if not context.user_set("accelerator_config"):
        settings["non_blocking"] = on_gpu
    settings = {name: value for name, value in settings.items() if not context.user_set(name)}
    reason = f"{workers} workers ({why}), pinned memory {'on' if pinned else 'off'}"
    return Decision(NAME, KIND, "applied", reason, settings)


def _num_workers(context: Context, on_gpu: bool) -> tuple[int, str]:
    if context.user_set("dataloader_num_workers"):
        return context.args.dataloader_num_workers, "asked for"
    if context.caches_all_inputs:
        return 0, "batches are look-ups in the embedding cache"
    # On a CPU the cores do the training; tokenization by table look-up takes well under 1 % of a step.
    per_process = context.cpu_cores // max(1, context.world_size)
    return min(MAX_WORKERS, max(0, per_process - 1)) if on_gpu else 0, f"{context.cpu_cores} cores"


def apply(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's own fields; `non_blocking` goes to Accelerate."""
    for name, value in decision.settings.items():
        if name == "non_blocking":
            run.args.accelerator_config.non_blocking = value
        else:
            setattr(run.args, name, value)
    return decision
