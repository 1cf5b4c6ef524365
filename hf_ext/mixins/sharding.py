"""FSDP2 inside a Trainer: what its YAML leaves to run time, from the first gather to a model folder that loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..models.wrapping import block_classes, choose_classes, exact_modules, find_blocks, unused_parameters
from ..overrides import find_own_loss
from ..processes import read_fsdp2
from ..speedups.ddp import search_again


class ShardingMixin:
    """Carries out decision `sharding` of the plan, where accelerate shards with FSDP2.

    Before the model is split: every process takes the weights of the first, as DDP would; accelerate gets the classes
    to split by that are in the model then. In half precision, on top of accelerate's policy: gradients are summed in
    float32; inputs and outputs of the model are not cast, since labels are among them; forward passes run under
    autocast, as under DDP; heads and frozen encoders of an `AffinityModel` keep the dtype of their weights.
    Evaluating or predicting before training splits the model too, which accelerate refuses without an optimizer.
    """

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    accelerator: Any
    plan: Any
    is_fsdp_enabled: bool
    model_init: Any
    compute_loss_func: Any  # of ExactLossMixin
    _exact: tuple[nn.Module, ...] = ()  # to be split apart from the rest

    @property
    def is_fsdp2(self) -> bool:
        """Whether this run splits weights with FSDP2."""
        return bool(self.accelerator.is_fsdp2)

    @property
    def _is_split(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer; then sets where DDP keeps gradients, and in which precision FSDP2 computes and sums."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if any(d.name == "ddp" and d.status == "applied" for d in self.plan.decisions):
            self.accelerator.ddp_handler.gradient_as_bucket_view = True  # which Trainer has no argument for
        if not self.is_fsdp2:
            return
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(
                plugin.mixed_precision_policy,
                reduce_dtype=torch.float32,
                output_dtype=None,
                cast_forward_inputs=False,
            )
            self.plan.record("sharding", gradients_summed_in="float32")

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; accelerate, which it leaves autocast to, applies none to models that FSDP2 splits."""
        if self.is_fsdp2 and self.accelerator.mixed_precision != "no":
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)  # type: ignore[misc]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_fsdp2:
            self._search_for_own_loss()
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if not self._is_split:
            self._begin_sharding()
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        # Evaluated, or trained, before. Accelerate 1.15 would pair weights and optimizer again, by address, which all
        # weights share that have no rows on this process.
        self.accelerator.prepare = self._keep_prepared
        try:
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.accelerator.prepare

    def _search_for_own_loss(self) -> None:
        """Where DDP was not to look for unused weights, and a loss of the user's was assigned after the plan."""
        own_loss = find_own_loss(self, self.compute_loss_func)
        if own_loss is None or not any(d.name == "ddp" and "watched" in d.evidence for d in self.plan.decisions):
            return
        search_again(self.model, self.accelerator.ddp_handler)
        self.plan.record("ddp", searches_again_for=own_loss)

    def _keep_prepared(self, *prepared: Any) -> tuple[Any, ...]:
        """What `Accelerator.prepare` notes of model and optimizer; Trainer has just made it forget them."""
        self.accelerator._models += [part for part in prepared if isinstance(part, FSDPModule)]
        self.accelerator._optimizers += [part for part in prepared if isinstance(part, AcceleratedOptimizer)]
        return prepared

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, which calls it as soon as accelerate has prepared model and optimizer."""
        self._end_sharding()
        return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        if not self.is_fsdp2:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        if not self._is_split:
            self._begin_sharding()
            self.create_optimizer()  # type: ignore[attr-defined]
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
            self._end_sharding()
        try:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what is gathered for a forward pass is given up by the backward pass alone

    @contextmanager
    def gathered_for_encoding(self) -> Iterator[None]:
        """Encoders can be called by themselves in here, by all processes equally often.

        Layers gather themselves; the rest of an encoder belongs to the model's own piece, which only `forward` gathers.
        """
        if not self._is_split:
            yield
            return
        self.model.unshard()
        try:
            yield
        finally:
            self.model.reshard()

    def gather_weights(self) -> dict[str, torch.Tensor]:
        """The whole state dict, in the dtype it trains in, under the model's own names; all processes call it.

        On the main process and in main memory; the others get nothing. A tensor that several names share is there once.
        Accelerate does it, so DTensors, offloaded ones and activation checkpointing's names are its affair; the same
        call gathers for `Accelerator.save_model`. Cost: one gather of each weight, and the model in main memory.
        """
        state = self.accelerator.get_state_dict(self.model)
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        return {name: tensor for name, tensor in state.items() if name not in tied}

    def _begin_sharding(self) -> None:
        """Before accelerate splits the model: the same weights everywhere, and what it is to split."""
        plugin = self.accelerator.state.fsdp_plugin
        self._take_weights_of_first()
        given = read_fsdp2(self.args)
        asked = given.transformer_cls_names_to_wrap if given else None
        if self.model_init is not None:  # the plan has not seen the model
            choose_classes(self.model, asked)
            for parameter in unused_parameters(self.model).values():
                parameter.requires_grad_(False)
        if plugin.mixed_precision_policy is not None:
            self._exact = tuple(exact_modules(self.model))
            plugin.ignored_modules = list(self._exact) or None
        apart = {part for module in self._exact for part in module.modules()}
        there = {type(module).__name__ for module in self.model.modules() if module not in apart}
        # Not those of the plan: frozen encoders were loaded since, or let go by the embedding cache.
        names = block_classes(self.model) if asked is None else asked
        plugin.transformer_cls_names_to_wrap = [name for name in names if name in there]
        # Accelerate 1.15 would make a piece of the embeddings, and so part BERT's output bias from the name it is tied
        # to, which torch refuses. Residues are few: their embeddings can stay in the model's own piece.
        self.model.get_input_embeddings = self.model.get_output_embeddings = lambda: None

    @torch.no_grad()
    def _take_weights_of_first(self) -> None:
        """Broadcasts, as DDP does: processes that drew other random heads would train pieces of different models."""
        if self.args.world_size == 1:
            return
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            tensor.copy_(broadcast(tensor.detach().to(self.args.device).contiguous()))

    def _end_sharding(self) -> None:
        """Splits what accelerate was told to leave out, by its own policy, and gives the optimizer the pieces."""
        for name in ("get_input_embeddings", "get_output_embeddings"):
            vars(self.model).pop(name, None)
        exact, self._exact = self._exact, ()
        if not exact:
            return
        plugin, mesh = self.accelerator.state.fsdp_plugin, self.accelerator.torch_device_mesh
        if mesh is not None:
            mesh = mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)]
        shared = {"mesh": mesh, "offload_policy": plugin.cpu_offload, "mp_policy": MixedPrecisionPolicy()}
        whole = dict(self.model.named_parameters())
        for module in exact:
            for block in find_blocks(module):
                if not isinstance(block, FSDPModule):  # of the class of a layer that trains: accelerate has marked it
                    fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **shared)
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **shared)
        pieces = {id(whole[name]): piece for name, piece in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [pieces.get(id(parameter), parameter) for parameter in group["params"]]
