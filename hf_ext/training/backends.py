"""How the processes of a run hold its weights, gradients and optimizer states: whole, under ZeRO, or under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, convert_outputs_to_fp32, get_mixed_precision_context_manager
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DummyOptim
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from ..checkpoints import Sizes
from ..errors import ArgumentError
from ..models import AffinityModel, block_classes, exact_modules, find_blocks
from ..plan import Plan
from ..processes import num_elements, offload_device, read_fsdp2, replaces_optimizer, splits_weights, zero_stage
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
    def is_spread(self) -> bool:
        """Whether a process may hold no more than its part of the model: a library then writes weights and optimizer
        into checkpoints, in files that it alone reads.
        """
        return bool(self._trainer.is_fsdp_enabled)

    @property
    def written_by(self) -> str:
        """What writes weights and states into checkpoints, and alone can read them."""
        return "FSDP 1" if self.is_spread else "Trainer"

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
        return self._trainer.accelerator.get_state_dict(self._trainer.model) if self.is_spread else None

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


def check_given(args: TrainingArguments, optimizers: Iterable[Any]) -> None:
    """Raises ArgumentError for an optimizer or schedule that is no name, under DeepSpeed."""
    if args.deepspeed_plugin is not None and any(given is not None for given in optimizers):
        raise ArgumentError(
            "Under DeepSpeed, Trainer drops the optimizers it is given and makes its own: pass "
            "optimizer_cls_and_kwargs, or name it with --optim."
        )


def check_optimizer(args: TrainingArguments, optimizer: Optimizer) -> None:
    """Raises ArgumentError for one that accelerate would silently replace: see `speedups/sharding.py`."""
    is_prepared = isinstance(optimizer, DeepSpeedOptimizerWrapper | DummyOptim)  # DeepSpeed made it, or will
    if replaces_optimizer(args) and type(optimizer) is not AdamW and not is_prepared:
        raise ArgumentError(
            f"ZeRO with its optimizer on the {offload_device(args)} would step DeepSpeed's CPU Adam, not the "
            f"{type(optimizer).__name__} of this trainer: give AdamW (--optim adamw_torch_fused), leave "
            "offload_optimizer_device out, or set zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON."
        )


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


class Fsdp2(Backend):
    """Carries out decision `sharding` of the plan, where accelerate splits weights with FSDP2.

    Before the model is split: every process takes the weights of the first, as DDP would; accelerate gets the classes
    to split by that are in the model then. In half precision, on top of accelerate's policy: gradients are summed in
    float32; inputs and outputs of the model are not cast, since labels are among them; its forward passes run under
    autocast, as accelerate has it under DDP alone; heads and frozen encoders of an `AffinityModel` keep the dtype of
    their weights. Evaluating or predicting before training splits the model too, which accelerate refuses without an
    optimizer.
    """

    is_spread = True

    @property
    def _accelerator(self) -> Any:
        return self._trainer.accelerator

    @property
    def _plugin(self) -> Any:
        return self._accelerator.state.fsdp_plugin

    @property
    def written_by(self) -> str:
        """Accelerate, in files or shards as its plugin says."""
        return f"FSDP2 ({self._plugin.state_dict_type})"

    def configure(self) -> None:
        """Sets in which precision FSDP2 computes and sums."""
        if self._plugin.mixed_precision_policy is not None:
            self._plugin.mixed_precision_policy = replace(
                self._plugin.mixed_precision_policy,
                reduce_dtype=torch.float32,
                output_dtype=None,
                cast_forward_inputs=False,
            )
            self._plan.record("sharding", gradients_summed_in="float32")

    # --- splitting --------------------------------------------------------------------------------------------------

    def begin_preparing(self) -> None:
        """Has a whole model split; keeps one as it is that was evaluated, or trained, before.

        Accelerate 1.15 would pair weights and optimizer again, by address, which all weights share that have no rows
        on this process.
        """
        self.configure()
        model = self._trainer.model
        is_split = isinstance(model, FSDPModule)
        # Before there is an optimizer, which takes the weights that train.
        prepare = self._keep_prepared if is_split else partial(self._split, self._ready(model))

        def prepare_once(*parts: Any) -> object:
            del self._accelerator.prepare
            return prepare(*parts)

        self._accelerator.prepare = prepare_once

    def prepare_to_evaluate(
        self, model: nn.Module, make_optimizer: Callable[[], Optimizer]
    ) -> tuple[nn.Module, Optimizer] | None:
        """Splits a model that is whole still."""
        if isinstance(model, FSDPModule):
            return None
        exact = self._ready(model)
        return self._split(exact, model, make_optimizer())

    def _keep_prepared(self, *prepared: object) -> tuple[object, ...]:
        """Records what `Accelerator.prepare` notes of model and optimizer; Trainer has just made it forget them."""
        self._accelerator._models += [part for part in prepared if isinstance(part, FSDPModule)]
        self._accelerator._optimizers += [part for part in prepared if isinstance(part, AcceleratedOptimizer)]
        return prepared

    def _split(self, exact: list[nn.Module], whole: Any, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Calls `Accelerator.prepare`, and does what it leaves undone: `exact`, and autocast."""
        # Accelerate 1.15 would make a piece of the embeddings, and so part BERT's output bias from the name it is tied
        # to, which torch refuses. Residues are few: their embeddings can stay in the model's own piece.
        whole.get_input_embeddings = whole.get_output_embeddings = lambda: None
        model, optimizer = type(self._accelerator).prepare(self._accelerator, whole, optimizer)
        del whole.get_input_embeddings, whole.get_output_embeddings
        before = dict(model.named_parameters())
        for module in exact:
            self._split_apart(module)
        pieces = {id(before[name]): piece for name, piece in model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [pieces.get(id(parameter), parameter) for parameter in group["params"]]
        if self._accelerator.native_amp:
            autocast = get_mixed_precision_context_manager(True, self._accelerator.autocast_handler)
            model._original_forward = model.forward  # where accelerate keeps it
            model.forward = convert_outputs_to_fp32(autocast(model.forward))
        return model, optimizer

    def _ready(self, model: nn.Module) -> list[nn.Module]:
        """Gives all processes the same weights, and accelerate what to split; returns what it leaves for afterwards."""
        self._take_weights_of_first(model)
        args = self._trainer.args
        given = read_fsdp2(args)
        asked = given.transformer_cls_names_to_wrap if given else None
        exact: list[nn.Module] = []
        if self._plugin.mixed_precision_policy is not None:
            exact = list(exact_modules(model))
            self._plugin.ignored_modules = exact or None
        apart = {part for module in exact for part in module.modules()}
        present = {type(module).__name__ for module in model.modules() if module not in apart}
        # Not those of the plan: frozen encoders were loaded since, or released by the embedding cache.
        names = block_classes(model) if asked is None else asked
        self._plugin.transformer_cls_names_to_wrap = [name for name in names if name in present]
        return exact

    def _split_apart(self, module: nn.Module) -> None:
        """Splits what accelerate was told to leave out, by its own policy."""
        mesh = self._accelerator.torch_device_mesh
        if mesh is not None:
            mesh = mesh[tuple(self._accelerator.parallelism_config.fsdp_dim_names)]
        policy: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": self._plugin.cpu_offload,
            "mp_policy": MixedPrecisionPolicy(),
            "reshard_after_forward": self._plugin.reshard_after_forward,
        }
        for block in find_blocks(module):
            if not isinstance(block, FSDPModule):  # of the class of a layer that trains: accelerate has marked it
                fully_shard(block, **policy)
        fully_shard(module, **policy)

    @torch.no_grad()
    def _take_weights_of_first(self, model: nn.Module) -> None:
        """Broadcasts, as DDP does: processes that drew other random heads would train pieces of different models."""
        if self._trainer.args.world_size == 1:
            return
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(broadcast(tensor.detach().to(self._trainer.args.device).contiguous()))

    # --- gathering --------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Gives up, in the end, what was gathered for forward passes, which the backward pass alone would."""
        try:
            yield
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @contextmanager
    def encoding(self, model: nn.Module) -> Iterator[None]:
        """Gathers the model's own piece, to which the rest of an encoder belongs; layers gather themselves.

        Only the model's `forward` would.
        """
        if not isinstance(model, FSDPModule):
            yield
            return
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Returns the whole state dict, in the dtype it trains in, under the model's own names; all processes call it.

        On the main process and in main memory; the others get nothing. A tensor that several names share is there once.
        Accelerate does it, so DTensors, offloaded ones and activation checkpointing's names are its affair; the same
        call gathers for `Accelerator.save_model`. Cost: one gather of each weight, and the model in main memory.
        """
        model = self._trainer.model
        tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
        return {name: tensor for name, tensor in self._accelerator.get_state_dict(model).items() if name not in tied}


def choose_backend(trainer: Host, plan: Plan) -> Backend:
    """Returns the backend that fits what accelerate made of the launch and of the trainer's arguments."""
    if trainer.is_deepspeed_enabled:
        return DeepSpeed(trainer, plan)
    return (Fsdp2 if trainer.accelerator.is_fsdp2 else Backend)(trainer, plan)
