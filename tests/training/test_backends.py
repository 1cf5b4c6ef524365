"""How processes hold a model, each way built without a Trainer: what it sets, saves, sizes and refuses."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware
from hf_ext.plan import Plan
from hf_ext.speedups import Decision, Run
from hf_ext.training.backends import DeepSpeed, Fsdp1, Fsdp2, Replicated, choose_backend
from hf_ext.training.backends.deepspeed import RANK_BYTES
from hf_ext.training.planned import PlannedRun


def make_planned(args, model=None, **evidence) -> PlannedRun:
    decisions = [
        Decision("ddp", "I", "applied" if evidence else "off", "", evidence=evidence),
        Decision("sharding", "I", "applied", ""),
        Decision("precision", "P", "applied", ""),
    ]
    return PlannedRun(Plan(describe_hardware("cpu"), decisions), Run(args, model), keeps_records=False)


def make_accelerator(deepspeed=None, fsdp=None, is_fsdp2=False, **given):
    state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
    return SimpleNamespace(state=state, is_fsdp2=is_fsdp2, mixed_precision="no", **given)


def make_deepspeed(stage=2, **given) -> DeepSpeed:
    args = make_args(**given)
    config = {"zero_optimization": {"stage": stage}}
    args.deepspeed_plugin = SimpleNamespace(hf_ds_config=HfDeepSpeedConfig(config), deepspeed_config=config)
    return DeepSpeed(args, make_accelerator(args.deepspeed_plugin), make_planned(args))


def make_fsdp2(model=None, policy=None) -> tuple[Fsdp2, SimpleNamespace, PlannedRun]:
    args, plugin = make_args(), SimpleNamespace(mixed_precision_policy=policy)
    planned = make_planned(args, model)
    return Fsdp2(args, make_accelerator(fsdp=plugin, is_fsdp2=True), planned), plugin, planned


@pytest.mark.parametrize(
    ("given", "kind", "is_spread", "written_by"),
    [
        ({}, Replicated, False, "Trainer"),
        ({"fsdp": SimpleNamespace()}, Fsdp1, True, "FSDP 1"),
        ({"fsdp": SimpleNamespace(state_dict_type="x"), "is_fsdp2": True}, Fsdp2, True, "FSDP2 (x)"),
        ({"deepspeed": SimpleNamespace()}, DeepSpeed, True, "ZeRO-None on 1 processes, its optimizer on the device"),
    ],
)
def test_one_is_chosen_by_what_accelerate_made_of_the_launch(given, kind, is_spread, written_by):
    args = make_args()
    backend = choose_backend(args, make_accelerator(**given), make_planned(args))
    assert (type(backend), backend.is_spread, backend.written_by) == (kind, is_spread, written_by)


def test_accelerates_own_accelerator_of_one_process_holds_the_model_whole_and_changes_nothing():
    args, model = make_args(), nn.Linear(2, 1)
    backend = choose_backend(args, Accelerator(cpu=True), make_planned(args))
    backend.configure(model)
    backend.check_given("an optimizer", "a schedule")
    loss, state = torch.tensor(torch.inf), {"weight": model.weight}
    with backend.preparing(model, None), backend.evaluating(model), backend.encoding(model):
        assert backend.carry_not_finite(loss, is_training=True) is loss
    assert backend.weights_to_save(state) is state
    nothing = [backend.autocast(), backend.whole_weights(model), backend.checkpoint_sizes(model, 5)]
    assert [*nothing, backend.prepare_to_evaluate(model, list)] == [None] * 4


# --- DDP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("evidence", "has_views"), [({}, False), ({"watched": 3}, True)])
def test_gradients_are_views_where_the_plan_says_so(evidence, has_views):
    args, handler = make_args(), DistributedDataParallelKwargs()
    backend = Replicated(args, make_accelerator(ddp_handler=handler), make_planned(args, **evidence))
    backend.configure(None)
    assert handler.gradient_as_bucket_view == has_views


@pytest.mark.parametrize("own_loss", [None, "compute_loss_func"])
def test_unused_weights_are_looked_for_again_under_a_loss_that_came_after_the_plan(own_loss):
    args, handler = make_args(), DistributedDataParallelKwargs(find_unused_parameters=False)
    planned = make_planned(args, watched=3)
    with Replicated(args, make_accelerator(ddp_handler=handler), planned).preparing(make_wide_esm(), own_loss):
        assert handler.find_unused_parameters == (own_loss is not None)
    assert planned.plan["ddp"].evidence.get("searches_again_for") == own_loss


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def test_in_half_precision_fsdp2_sums_in_float32_and_casts_neither_inputs_nor_outputs():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, True)
    backend, plugin, planned = make_fsdp2(policy=policy)
    backend.configure(None)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False)
    assert planned.plan["sharding"].evidence == {"gradients_summed_in": "float32"}


def test_accelerate_is_told_the_layers_of_the_model_and_not_of_its_embeddings():
    model = make_wide_esm()
    backend, plugin, _ = make_fsdp2(model)
    with backend.preparing(model, None):
        assert plugin.transformer_cls_names_to_wrap == ["EsmLayer"]
        assert model.get_input_embeddings() is None
    backend.finish_splitting(model, torch.optim.SGD(model.parameters()))
    assert isinstance(model.get_input_embeddings(), nn.Embedding)


@pytest.mark.parametrize("is_planned", [True, False])
def test_of_a_model_that_the_plan_has_not_seen_the_contact_head_is_frozen_here(is_planned):
    model = make_wide_esm()
    model.requires_grad_(True)
    backend, _, _ = make_fsdp2(model if is_planned else None)
    with backend.preparing(model, None):
        head = [p.requires_grad for name, p in model.named_parameters() if "contact_head" in name]
    assert head == [is_planned] * 2


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def test_a_training_loss_that_is_not_finite_has_no_finite_gradient_and_a_finite_one_is_as_it_was():
    backend = make_deepspeed()
    for value, gradient in ((2.5, 1.0), (torch.inf, torch.nan)):
        loss = torch.tensor(value, requires_grad=True)
        carried = backend.carry_not_finite(loss, is_training=True)
        carried.backward()
        assert torch.allclose(loss.grad, torch.tensor(gradient), equal_nan=True)
        assert (carried.item() == value) == (value == 2.5)
        assert backend.carry_not_finite(loss, is_training=False) is loss


def test_sizes_are_those_of_the_weights_and_of_deepspeeds_own_states():
    model = nn.Linear(2, 1)  # 3 parameters of 4 bytes; trained, a copy and two states of 4 bytes for each
    sizes = make_deepspeed().checkpoint_sizes(model, small_bytes=5)
    assert (sizes.weights, sizes.optimizer, sizes.other) == (12 + 2**16, 3 * 16 + RANK_BYTES, 5)
    model.bias.requires_grad_(False)
    assert make_deepspeed().checkpoint_sizes(model, 5).optimizer == 2 * 16 + RANK_BYTES
    assert make_deepspeed(save_only_model=True).checkpoint_sizes(model, 5).optimizer == 0


@pytest.mark.parametrize(("stage", "is_handed_on"), [(2, False), (3, True)])
def test_weights_that_accelerate_gathered_are_saved_only_where_they_were_split(stage, is_handed_on):
    state = {"weight": torch.ones(1)}
    assert make_deepspeed(stage).weights_to_save(state) == (state if is_handed_on else None)


def test_an_optimizer_that_trainer_would_drop_is_refused():
    backend = make_deepspeed()
    backend.check_given(None, None)
    with pytest.raises(ArgumentError, match="optimizer_cls_and_kwargs"):
        backend.check_given(object(), None)
