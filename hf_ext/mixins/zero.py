"""DeepSpeed's ZeRO inside a Trainer: steps that are judged, its own files in our checkpoints, models that load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper, DummyOptim
from torch.optim import AdamW

from ..checkpoints.agreement import refuse
from ..checkpoints.budget import Sizes
from ..checkpoints.hyperparameters import apply_changes, read_hyperparameters
from ..checkpoints.state import load_scheduler_tree, scheduler_tree
from ..checkpoints.stored import Stored
from ..checkpoints.trees import load_tree, save_tree
from ..errors import ArgumentError, CheckpointError
from ..models.affinity import AffinityModel
from ..zero import (
    STATE_FACTS,
    STATE_FOLDER,
    num_elements,
    offload_device,
    replaces_optimizer,
    splits_weights,
    zero_stage,
)

RANK_BYTES = 2**18  # pickled names and settings, per process
_WEIGHTS = "or start a new run from its weights (model.safetensors in it; --model_name_or_path)"

logger = logging.getLogger(__name__)


class ZeroMixin:
    """Trains, saves and resumes under ZeRO; does nothing without DeepSpeed.

    DeepSpeed steps inside the last backward pass of a step, and leaves out, in silence, a step whose gradients are not
    finite: `nan_policy` then says so and decides. A loss that is not finite makes them so.

    Checkpoints hold, under our manifest, the weights as `save_model` writes them, our schedule, random states and
    progress, and the folder `zero` that DeepSpeed writes and alone can read. Its files are pickles: they are loaded
    only from a checkpoint of this output folder whose every byte is as its manifest says. They fit the same stage and
    number of processes only.

    Raises (when a run is resumed):
        CheckpointError: a checkpoint of elsewhere, of stock Trainer, without ZeRO or with another ZeRO.
    """

    args: Any
    model: Any
    model_wrapped: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    checkpoints: Any
    plan: Any
    is_deepspeed_enabled: bool
    _resumed: Stored | None
    _allowed_changes: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled and (self.optimizer is not None or self.lr_scheduler is not None):
            raise ArgumentError(
                "Under DeepSpeed, Trainer drops the optimizers it is given and makes its own: pass "
                "optimizer_cls_and_kwargs, or name it with --optim."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer; an `AffinityModel` in half precision keeps its weights and labels in float32.

        DeepSpeed's bf16 and fp16 cast all weights, heads too, and Trainer then casts labels like inputs: a pKd of 7.31
        is 7.3125 in bf16. Under its autocast, as under DDP, products alone are in half precision.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        half = {"bf16": "bfloat16", "fp16": "float16"}.get(self.args.mixed_precision)
        if not self.is_deepspeed_enabled or half is None or not isinstance(self.model, AffinityModel):
            return
        plugin = self.accelerator.state.deepspeed_plugin
        for name in ("bf16", "fp16"):
            plugin.deepspeed_config.get(name, {})["enabled"] = False
        plugin.deepspeed_config["torch_autocast"] = {"enabled": True, "dtype": half}
        plugin.hf_ds_config._dtype = torch.float32
        self.plan.record("precision", weights="float32", products=half)

    # --- steps ------------------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; a training loss that is not finite is one whose gradients are not either."""
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not self.is_deepspeed_enabled or not model.training or not isinstance(found, torch.Tensor):
            return found
        return found * torch.where(found.detach().isfinite(), 1.0, torch.nan)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; refuses one that accelerate would silently replace: see `speedups/zero.py`."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if replaces_optimizer(self.args) and type(optimizer) is not AdamW and not _is_prepared(optimizer):
            raise ArgumentError(
                f"ZeRO with its optimizer on the {offload_device(self.args)} would step DeepSpeed's CPU Adam, not the "
                f"{type(optimizer).__name__} of this trainer: give AdamW (--optim adamw_torch_fused), leave "
                "offload_optimizer_device out, or set zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON."
            )
        return optimizer

    def check_step(self) -> None:
        """As `NanPolicyMixin`; the schedule moves on after a step that was left out, as without DeepSpeed."""
        super().check_step()  # type: ignore[misc]
        if self.is_deepspeed_enabled and not self.args.fp16:
            self.optimizer.optimizer.overflow = False

    # --- saving -----------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # Up to ZeRO-2 the model is whole here, and tied weights are one, which accelerate's copies are not.
        is_whole = self.is_deepspeed_enabled and not splits_weights(self.args)
        super()._save(output_dir, None if is_whole else state_dict)  # type: ignore[misc]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint_sizes(self) -> Sizes:
        """Upper bounds of what one checkpoint takes."""
        if not self.is_deepspeed_enabled:
            return super().checkpoint_sizes()  # type: ignore[misc]
        parameters = [(num_elements(p), p.element_size(), p.requires_grad) for p in self.model.parameters()]
        weights = sum(number * size for number, size, _ in parameters)
        weights += sum(buffer.nbytes for buffer in self.model.buffers())
        trained = sum(number * (size + 12) for number, size, trains in parameters if trains)  # fp32 weights, two states
        zero = 0 if self.args.save_only_model else trained + RANK_BYTES * self.args.world_size
        small = 2**20 + self.early_stopping_bytes()  # type: ignore[attr-defined]
        return Sizes(weights + 2**16, zero, small, zero)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        folder = Path(output_dir)
        leaves_out = not all(p.requires_grad for p in self.model.parameters())
        self.model_wrapped.save_checkpoint(output_dir, tag=STATE_FOLDER, exclude_frozen_parameters=leaves_out)
        if self.args.should_save:
            for program in folder.glob("zero_to_*.py"):  # has no place among a run's numbers
                program.unlink()
            (folder / STATE_FACTS).write_text(json.dumps(self._describe_zero(), indent=2) + "\n")
            if not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):  # else DeepSpeed keeps its state
                save_tree(folder, "scheduler", scheduler_tree(self.lr_scheduler))

    def _describe_zero(self) -> dict[str, Any]:
        return {
            "stage": zero_stage(self.args),
            "processes": self.args.world_size,
            "optimizer on": offload_device(self.args) or "the device",
        }

    def _agree_with(self, stored: Stored) -> None:
        has_files = STATE_FACTS in stored.manifest.files
        if self.is_deepspeed_enabled and has_files:
            self._check_trusted(stored)
            saved, own = json.loads((stored.path / STATE_FACTS).read_text()), self._describe_zero()
            different = [f"ZeRO's {key}: {saved.get(key)} in the checkpoint, {own[key]} now" for key in own]
            different = [text for key, text in zip(own, different) if saved.get(key) != own[key]]
            if different:
                listed = "\n  ".join(different)
                raise CheckpointError(
                    f"{stored.path}: DeepSpeed's state fits what wrote it alone:\n  {listed}\nLaunch it as before, "
                    f"{_WEIGHTS}. A checkpoint of FSDP2 or DDP resumes on another number of processes."
                )
        elif has_files != self.is_deepspeed_enabled:
            what = "with DeepSpeed, this run is not" if has_files else "without DeepSpeed, this run is with it"
            raise CheckpointError(f"{stored.path} was written {what}: launch it as before, {_WEIGHTS}.")
        super()._agree_with(stored)  # type: ignore[misc]

    def _check_trusted(self, stored: Stored) -> None:
        own = {Path(self.args.output_dir).resolve(), self.checkpoints.folder.resolve()}
        if stored.path.parent.resolve() not in own:
            raise CheckpointError(
                f"{stored.path} is not in this run's output folder, and DeepSpeed's files are pickles, which can run "
                "anything when they are loaded. If you trust it, give its folder as --output_dir with --resume auto, "
                f"{_WEIGHTS}."
            )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        # Else `save_model` writes a DeepSpeed checkpoint, which `from_pretrained` cannot read.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if resume_from_checkpoint is not None and self._resumed is None:
            raise CheckpointError(
                f"{resume_from_checkpoint} is a stock Trainer checkpoint of DeepSpeed's pickles, which nothing can "
                f"verify: it is not loaded. Continue it with transformers.Trainer, {_WEIGHTS}."
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)  # type: ignore[misc]
        if self._resumed is not None:
            self._restore_zero(self._resumed)
        return prepared

    def _restore_zero(self, stored: Stored) -> None:
        """Weights, optimizer and schedule of a verified checkpoint."""
        lost = self._allowed_changes & {"optim", "lr_scheduler_type"}
        refuse(stored.path, [f"{name}: DeepSpeed loads its states whole, so it cannot change" for name in sorted(lost)])
        made = read_hyperparameters(self.optimizer)
        self._load_zero(stored.path)
        if not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):
            load_scheduler_tree(self.lr_scheduler, load_tree(stored.path, "scheduler"))
        apply_changes(self.optimizer, self.lr_scheduler, made, self._allowed_changes, stored.step)

    def _load_zero(self, folder: Path) -> None:
        is_whole = all(p.requires_grad for p in self.model.parameters())
        found, _ = self.model_wrapped.load_checkpoint(str(folder), tag=STATE_FOLDER, load_module_strict=is_whole)
        if found is None:
            raise CheckpointError(f"{folder}: DeepSpeed found nothing in {STATE_FOLDER}/ that it could load.")

    def _load_best_model(self) -> None:
        if not self.is_deepspeed_enabled or self.stop_reason:  # type: ignore[attr-defined]
            super()._load_best_model()  # type: ignore[misc]
            return
        best = Path(self.state.best_model_checkpoint)
        stored = self._on_main(lambda: self.checkpoints.open(best))  # type: ignore[attr-defined]
        logger.info("Loading the best model, of step %d.", stored.step)
        self._check_trusted(stored)
        self._load_zero(stored.path)


def _is_prepared(optimizer: Any) -> bool:
    """Whether DeepSpeed made it, or will from its own configuration."""
    return isinstance(optimizer, DeepSpeedOptimizerWrapper | DummyOptim)
