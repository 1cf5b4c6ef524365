"""DeepSpeed's ZeRO: steps that are judged, its own files in our checkpoints, models that load."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper, DummyOptim
from torch import nn
from torch.optim import AdamW

from ...checkpoints.agreement.comparing import refuse
from ...checkpoints.agreement.hyperparameters import apply_changes, read_hyperparameters
from ...checkpoints.format.stored import Stored
from ...checkpoints.format.trees import load_tree, save_tree
from ...checkpoints.retention.budget import Sizes
from ...checkpoints.state.steppers import load_scheduler_tree, scheduler_tree
from ...errors import ArgumentError, CheckpointError
from ...models.affinity import AffinityModel
from ...zero import (
    STATE_FACTS,
    STATE_FOLDER,
    num_elements,
    offload_device,
    replaces_optimizer,
    splits_weights,
    zero_stage,
)
from .base import FROM_WEIGHTS, Backend

RANK_BYTES = 2**18  # pickled names and settings, per process


class DeepSpeed(Backend):
    """Trains, saves and resumes under ZeRO.

    DeepSpeed steps inside the last backward pass of a step, and leaves out, in silence, a step whose gradients are not
    finite: `nan_policy` then says so and decides. A loss that is not finite makes them so.

    Checkpoints hold, under our manifest, the weights as `save_model` writes them, our schedule, random states and
    progress, and the folder `zero` that DeepSpeed writes and alone can read. Its files are pickles: they are loaded
    only from a checkpoint of this output folder whose every byte is as its manifest says. They fit the same stage and
    number of processes only.
    """

    is_spread = True
    keeps_library_files = True
    loads_itself = True

    def configure(self, model: nn.Module | None) -> None:
        """Keeps weights and labels of an `AffinityModel` in float32, in half precision too.

        DeepSpeed's bf16 and fp16 cast all weights, heads too, and Trainer then casts labels like inputs: a pKd of 7.31
        is 7.3125 in bf16. Under its autocast, as under DDP, products alone are in half precision.
        """
        half = {"bf16": "bfloat16", "fp16": "float16"}.get(self._args.mixed_precision)
        if half is None or not isinstance(model, AffinityModel):
            return
        plugin = self._accelerator.state.deepspeed_plugin
        for name in ("bf16", "fp16"):
            plugin.deepspeed_config.get(name, {})["enabled"] = False
        plugin.deepspeed_config["torch_autocast"] = {"enabled": True, "dtype": half}
        plugin.hf_ds_config._dtype = torch.float32
        self._planned.plan.record("precision", weights="float32", products=half)

    def check_given(self, optimizer: Any, lr_scheduler: Any) -> None:
        """Raises ArgumentError for an optimizer or schedule that is no name."""
        if optimizer is not None or lr_scheduler is not None:
            raise ArgumentError(
                "Under DeepSpeed, Trainer drops the optimizers it is given and makes its own: pass "
                "optimizer_cls_and_kwargs, or name it with --optim."
            )

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ArgumentError for one that accelerate would silently replace: see `speedups/zero.py`."""
        if replaces_optimizer(self._args) and type(optimizer) is not AdamW and not _is_prepared(optimizer):
            raise ArgumentError(
                f"ZeRO with its optimizer on the {offload_device(self._args)} would step DeepSpeed's CPU Adam, not the "
                f"{type(optimizer).__name__} of this trainer: give AdamW (--optim adamw_torch_fused), leave "
                "offload_optimizer_device out, or set zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON."
            )

    @contextmanager
    def preparing(self, model: nn.Module, own_loss: str | None) -> Iterator[None]:
        """Has `save_model` write whole weights, not DeepSpeed's files, which `from_pretrained` cannot read."""
        config = self._accelerator.state.deepspeed_plugin.deepspeed_config
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        yield

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_own_loss_scale(self) -> bool:
        """In float16, where DeepSpeed ends a run at its lowest scale itself."""
        return bool(self._args.fp16)

    def carry_not_finite(self, loss: Any, is_training: bool) -> Any:
        """A training loss whose gradients are not finite either, if it is not."""
        if not is_training or not isinstance(loss, torch.Tensor):
            return loss
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)

    def forget_overflow(self, optimizer: Any) -> None:
        """Lets the schedule move on after a step that was left out, as without DeepSpeed."""
        if not self._args.fp16:
            optimizer.optimizer.overflow = False

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def weights_to_save(self, state_dict: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """Up to ZeRO-2 the model is whole here, and tied weights are one, which accelerate's copies are not."""
        return state_dict if splits_weights(self._args) else None

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Upper bounds of what one checkpoint takes."""
        parameters = [(num_elements(p), p.element_size(), p.requires_grad) for p in model.parameters()]
        weights = sum(number * size for number, size, _ in parameters)
        weights += sum(buffer.nbytes for buffer in model.buffers())
        trained = sum(number * (size + 12) for number, size, trains in parameters if trains)  # fp32 weights, two states
        zero = 0 if self._args.save_only_model else trained + RANK_BYTES * self._args.world_size
        return Sizes(weights + 2**16, zero, small_bytes, zero)

    def write_state(self, folder: Path, model: nn.Module, engine: Any, lr_scheduler: Any) -> bool:
        """Writes DeepSpeed's folder, whom its files fit, and our schedule."""
        leaves_out = not _trains_all(model)
        engine.save_checkpoint(str(folder), tag=STATE_FOLDER, exclude_frozen_parameters=leaves_out)
        if self._args.should_save:
            for program in folder.glob("zero_to_*.py"):  # has no place among a run's numbers
                program.unlink()
            (folder / STATE_FACTS).write_text(json.dumps(self._facts(), indent=2) + "\n")
            if not isinstance(lr_scheduler, DeepSpeedSchedulerWrapper):  # else DeepSpeed keeps its state
                save_tree(folder, "scheduler", scheduler_tree(lr_scheduler))
        return True

    def _facts(self) -> dict[str, Any]:
        return {
            "stage": zero_stage(self._args),
            "processes": self._args.world_size,
            "optimizer on": offload_device(self._args) or "the device",
        }

    # --- resuming ---------------------------------------------------------------------------------------------------

    def agrees_with(self, stored: Stored, own_folders: Collection[Path]) -> None:
        """Refuses what DeepSpeed's state would not fit, and pickles of elsewhere; see `Backend`."""
        if STATE_FACTS not in stored.manifest.files:
            raise CheckpointError(
                f"{stored.path} was written without DeepSpeed, this run is with it: launch it as before, "
                f"{FROM_WEIGHTS}."
            )
        _check_trusted(stored, own_folders)
        saved, own = json.loads((stored.path / STATE_FACTS).read_text()), self._facts()
        different = [
            f"ZeRO's {key}: {saved.get(key)} in the checkpoint, {own[key]} now"
            for key in own
            if saved.get(key) != own[key]
        ]
        if different:
            listed = "\n  ".join(different)
            raise CheckpointError(
                f"{stored.path}: DeepSpeed's state fits what wrote it alone:\n  {listed}\nLaunch it as before, "
                f"{FROM_WEIGHTS}. A checkpoint of FSDP2 or DDP resumes on another number of processes."
            )

    def left_to_trainer(self, checkpoint: str | None, stored: Stored | None) -> str | None:
        """Nothing: `restore` loads what is ours, and refuses what is not.

        Raises:
            CheckpointError: it is one of stock Trainer.
        """
        if checkpoint is not None and stored is None:
            raise CheckpointError(
                f"{checkpoint} is a stock Trainer checkpoint of DeepSpeed's pickles, which nothing can "
                f"verify: it is not loaded. Continue it with transformers.Trainer, {FROM_WEIGHTS}."
            )
        return None

    def restore(self, stored: Stored, allowed: Collection[str], engine: Any, optimizer: Any, lr_scheduler: Any) -> None:
        """Weights, optimizer and schedule of a verified checkpoint.

        Raises:
            CheckpointError: another optimizer or schedule was allowed, which DeepSpeed cannot load apart.
        """
        lost = {"optim", "lr_scheduler_type"}.intersection(allowed)
        refuse(stored.path, [f"{name}: DeepSpeed loads its states whole, so it cannot change" for name in sorted(lost)])
        made = read_hyperparameters(optimizer)
        _load(stored.path, engine)
        if not isinstance(lr_scheduler, DeepSpeedSchedulerWrapper):
            load_scheduler_tree(lr_scheduler, load_tree(stored.path, "scheduler"))
        apply_changes(optimizer, lr_scheduler, made, allowed, stored.step)

    def load_model(self, stored: Stored, own_folders: Collection[Path], engine: Any) -> None:
        """The weights of the best checkpoint, if it is this run's.

        Raises:
            CheckpointError: it is of elsewhere, or DeepSpeed found nothing in it.
        """
        _check_trusted(stored, own_folders)
        _load(stored.path, engine)


def _load(folder: Path, engine: Any) -> None:
    found, _ = engine.load_checkpoint(str(folder), tag=STATE_FOLDER, load_module_strict=_trains_all(engine))
    if found is None:
        raise CheckpointError(f"{folder}: DeepSpeed found nothing in {STATE_FOLDER}/ that it could load.")


def _trains_all(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _check_trusted(stored: Stored, own_folders: Collection[Path]) -> None:
    if stored.path.parent.resolve() not in {folder.resolve() for folder in own_folders}:
        raise CheckpointError(
            f"{stored.path} is not in this run's output folder, and DeepSpeed's files are pickles, which can run "
            "anything when they are loaded. If you trust it, give its folder as --output_dir with --resume auto, "
            f"{FROM_WEIGHTS}."
        )


def _is_prepared(optimizer: Any) -> bool:
    """Whether DeepSpeed made it, or will from its own configuration."""
    return isinstance(optimizer, DeepSpeedOptimizerWrapper | DummyOptim)
