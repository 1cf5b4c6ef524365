"""DeepSpeed's ZeRO: steps that are judged, its own files in our checkpoints, models that load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DummyOptim
from torch import nn
from torch.optim import AdamW

from ...checkpoints.retention import Sizes
from ...errors import ArgumentError
from ...models.affinity import AffinityModel
from ...processes.sharding import num_elements, offload_device, replaces_optimizer, splits_weights, zero_stage
from .base import Backend

RANK_BYTES = 2**18  # pickled names and settings, per process


class DeepSpeed(Backend):
    """Trains, saves and resumes under ZeRO.

    DeepSpeed steps inside the last backward pass of a step, and leaves out, in silence, a step whose gradients are not
    finite: here the run then ends. A loss that is not finite makes them so.

    Checkpoints hold, under our manifest, what Trainer writes under DeepSpeed. Its files are pickles: they are loaded
    only from a checkpoint of this output folder.
    """

    is_zero = True
    is_spread = True

    @property
    def written_by(self) -> str:
        """DeepSpeed, whose files fit the same stage and number of processes alone."""
        args = self._trainer.args
        return f"ZeRO-{zero_stage(args)} on {args.world_size} processes, its optimizer on " + (
            offload_device(args) or "the device"
        )

    def configure(self) -> None:
        """Has whole weights saved, and keeps weights and labels of an `AffinityModel` in float32.

        DeepSpeed's own files are nothing that `from_pretrained` can read. Its bf16 and fp16 cast all weights, heads
        too, and Trainer then casts labels like inputs: a pKd of 7.31 is 7.3125 in bf16. Under its autocast, as under
        DDP, products alone are in half precision.
        """
        trainer = self._trainer
        plugin = trainer.accelerator.state.deepspeed_plugin
        config = plugin.deepspeed_config
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        half = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.args.mixed_precision)
        if half is not None and isinstance(trainer.model, AffinityModel):
            for name in ("bf16", "fp16"):
                config.get(name, {})["enabled"] = False
            config["torch_autocast"] = {"enabled": True, "dtype": half}
            plugin.hf_ds_config._dtype = torch.float32
            trainer.plan.record("precision", weights="float32", products=half)

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_own_loss_scale(self) -> bool:  # type: ignore[override]
        """In float16, where DeepSpeed ends a run at its lowest scale itself."""
        return bool(self._trainer.args.fp16)

    def carry_not_finite(self, loss: Any, is_training: bool) -> Any:
        """A training loss whose gradients are not finite either, if it is not."""
        if not is_training or not isinstance(loss, torch.Tensor):
            return loss
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)

    # --- saving -----------------------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Gathered under ZeRO-3; else the model at hand is whole, with tied weights once."""
        splits = splits_weights(self._trainer.args)
        return self._trainer.accelerator.get_state_dict(self._trainer.deepspeed) if splits else None

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Upper bounds of what one checkpoint takes."""
        args = self._trainer.args
        parameters = [(num_elements(p), p.element_size(), p.requires_grad) for p in model.parameters()]
        weights = sum(number * size for number, size, _ in parameters)
        weights += sum(buffer.nbytes for buffer in model.buffers())
        trained = sum(number * (size + 12) for number, size, trains in parameters if trains)  # fp32 weights, two states
        zero = 0 if args.save_only_model else trained + RANK_BYTES * args.world_size
        return Sizes(weights + 2**16, zero, small_bytes)


def check_given(args: Any, optimizers: Iterable[Any]) -> None:
    """Raises ArgumentError for an optimizer or schedule that is no name, under DeepSpeed."""
    if args.deepspeed_plugin is not None and any(given is not None for given in optimizers):
        raise ArgumentError(
            "Under DeepSpeed, Trainer drops the optimizers it is given and makes its own: pass "
            "optimizer_cls_and_kwargs, or name it with --optim."
        )


def check_optimizer(args: Any, optimizer: Any) -> None:
    """Raises ArgumentError for one that accelerate would silently replace: see `speedups/sharding.py`."""
    is_prepared = isinstance(optimizer, DeepSpeedOptimizerWrapper | DummyOptim)  # DeepSpeed made it, or will
    if replaces_optimizer(args) and type(optimizer) is not AdamW and not is_prepared:
        raise ArgumentError(
            f"ZeRO with its optimizer on the {offload_device(args)} would step DeepSpeed's CPU Adam, not the "
            f"{type(optimizer).__name__} of this trainer: give AdamW (--optim adamw_torch_fused), leave "
            "offload_optimizer_device out, or set zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON."
        )
