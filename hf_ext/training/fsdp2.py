"""FSDP2 as a backend of a run: what accelerate leaves undone where it splits weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, convert_outputs_to_fp32, get_mixed_precision_context_manager
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from ..models import block_classes, exact_modules, find_blocks
from ..processes import read_fsdp2
from .backends import Backend


class Fsdp2(Backend):
    """Carries out decision `sharding` of the plan, where accelerate splits weights with FSDP2.

    Before the model is split: every process takes the weights of the first, as DDP would; accelerate gets the classes
    to split by that are in the model then. In half precision, on top of accelerate's policy: gradients are summed in
    float32; inputs and outputs of the model are not cast, since labels are among them; its forward passes run under
    autocast, as accelerate has it under DDP alone; heads and frozen encoders of an `AffinityModel` keep the dtype of
    their weights. Evaluating or predicting before training splits the model too, which accelerate refuses without an
    optimizer.
    """

    is_sharded = True

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
