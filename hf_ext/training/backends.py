"""How the processes of a run hold its weights, gradients and optimizer states: whole, or under ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoints import Sizes
from ..models import AffinityModel
from ..plan import Plan
from ..processes import num_elements, offload_device, splits_weights, zero_stage
from .host import Host

Loss = Tensor | tuple[Tensor, Any]  # with what the model returned
RANK_BYTES = 2**18  # of DeepSpeed's files: pickled names and settings, per process


class Backend:
    """The whole model on each process: one alone, DataParallel, DDP. And FSDP 1, which is left to accelerate.

    Attributes:
        is_zero: whether it is DeepSpeed, which steps inside the last backward pass.
        has_own_loss_scale: whether a library steps with a loss scale of its own, which no `GradScaler` shows.
    """

    is_zero = False
    has_own_loss_scale = False

    def __init__(self, trainer: Host, plan: Plan):
        self._trainer = trainer
        self._plan = plan

    @property
    def is_sharded(self) -> bool:
        """Whether a process may have no more than its shard of the model: a library then writes weights and optimizer
        into checkpoints, in files that it alone reads.
        """
        return bool(self._trainer.is_fsdp_enabled)

    @property
    def written_by(self) -> str:
        """What writes weights and states into checkpoints, and alone can read them."""
        return "FSDP 1" if self.is_sharded else "Trainer"

    # --- before training --------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Sets what Trainer has no argument for, in the Accelerator at hand, before that wraps a model."""
        if self._plan.applied("ddp"):
            self._trainer.accelerator.ddp_handler.gradient_as_bucket_view = True

    def begin_preparing(self) -> None:
        """Prepares for training, before there is an optimizer and accelerate wraps it and the model."""
        self.configure()  # each trial of a search has an Accelerator of its own

    # --- computing --------------------------------------------------------------------------------------------------

    def carry_not_finite(self, loss: Loss, is_training: bool) -> Loss:
        """Returns a training loss whose gradients are not finite either, if it is not."""
        return loss

    def prepare_to_evaluate(
        self, model: nn.Module, make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer] | None:
        """Returns model and optimizer as accelerate prepares them, where evaluating before training needs that."""
        return None

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Wraps an evaluation of the model."""
        return nullcontext()

    def encoding(self, model: nn.Module) -> AbstractContextManager[None]:
        """Lets encoders be called by themselves inside, by all processes equally often."""
        return nullcontext()

    # --- saving -----------------------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Returns the whole state dict, gathered; None where the model at hand has it. All processes call it."""
        return self._trainer.accelerator.get_state_dict(self._trainer.model) if self.is_sharded else None

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Bounds what one checkpoint takes from above, `small_bytes` of it for what is neither weights nor optimizer.

        None where the files are ours, and their writers can be asked.
        """
        return None


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


class DeepSpeed(Backend):
    """Trains, saves and resumes under ZeRO.

    DeepSpeed steps inside the last backward pass of a step, and leaves out, in silence, a step whose gradients are not
    finite: here the run then ends. A loss that is not finite makes them so.

    Checkpoints hold, under our manifest, what Trainer writes under DeepSpeed. Its files are pickles: they are loaded
    only from a checkpoint of this output folder.
    """

    is_zero = True
    is_sharded = True

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
            self._plan.record("precision", weights="float32", products=half)

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_own_loss_scale(self) -> bool:  # type: ignore[override]
        """In float16, where DeepSpeed ends a run at its lowest scale itself."""
        return bool(self._trainer.args.fp16)

    def carry_not_finite(self, loss: Loss, is_training: bool) -> Loss:
        """Returns a training loss whose gradients are not finite either, if it is not."""
        if not is_training or not isinstance(loss, Tensor):
            return loss
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)

    # --- saving -----------------------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Gathers under ZeRO-3; else the model at hand is whole, with tied weights once."""
        splits = splits_weights(self._trainer.args)
        return self._trainer.accelerator.get_state_dict(self._trainer.deepspeed) if splits else None

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Returns upper bounds of what one checkpoint takes."""
        args = self._trainer.args
        parameters = [(num_elements(p), p.element_size(), p.requires_grad) for p in model.parameters()]
        weights = sum(number * size for number, size, _ in parameters)
        weights += sum(buffer.nbytes for buffer in model.buffers())
        trained = sum(number * (size + 12) for number, size, trains in parameters if trains)  # fp32 weights, two states
        zero = 0 if args.save_only_model else trained + RANK_BYTES * args.world_size
        return Sizes(weights + 2**16, zero, small_bytes)
