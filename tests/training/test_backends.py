"""How processes hold a model, each way without other processes: what it sets, sizes and refuses."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from tiny_masked_lm import make_args, make_trainer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_ext.errors import ArgumentError
from hf_ext.training.backends import choose_backend
from hf_ext.training.backends.deepspeed import RANK_BYTES, check_given


def launched(stage=None, plugin=None, version=None, **given):
    """A trainer as a launch with DeepSpeed, FSDP or neither leaves it, as far as its backend asks."""
    args = make_args(**given)
    if stage is not None:
        config = {"zero_optimization": {"stage": stage}}
        args.deepspeed_plugin = SimpleNamespace(hf_ds_config=HfDeepSpeedConfig(config), deepspeed_config=config)
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=args.deepspeed_plugin)
    trainer = SimpleNamespace(args=args, model=nn.Linear(2, 1), deepspeed="engine", plan=SimpleNamespace(record=print))
    trainer.accelerator = SimpleNamespace(
        state=state, is_fsdp2=version == 2, get_state_dict=lambda model: {"of": model}
    )
    trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = stage is not None, version is not None
    return trainer


def test_each_trial_of_a_search_gets_the_settings_of_its_own_accelerator(tmp_path):
    trainer = make_trainer(tmp_path)
    before, backend = trainer.accelerator, trainer._ext_backend
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is not before
    assert trainer._ext_backend is backend
    trainer.train()
    assert trainer.state.global_step == 4


def test_in_half_precision_fsdp2_sums_in_float32_and_casts_neither_inputs_nor_outputs():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, True)
    trainer = launched(version=2, plugin=SimpleNamespace(mixed_precision_policy=policy))
    trainer.plan = SimpleNamespace(record=lambda name, **evidence: seen.append((name, evidence)))
    seen = []
    choose_backend(trainer).configure()
    found = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    assert found == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False)
    assert seen == [("sharding", {"gradients_summed_in": "float32"})]


def test_under_zero_a_training_loss_that_is_not_finite_has_no_finite_gradient_and_a_finite_one_is_as_it_was():
    backend = choose_backend(launched(stage=2))
    for value, gradient in ((2.5, 1.0), (torch.inf, torch.nan)):
        loss = torch.tensor(value, requires_grad=True)
        carried = backend.carry_not_finite(loss, is_training=True)
        carried.backward()
        assert torch.allclose(loss.grad, torch.tensor(gradient), equal_nan=True)
        assert (carried.item() == value) == (value == 2.5)
        assert backend.carry_not_finite(loss, is_training=False) is loss


def test_sizes_are_those_of_the_weights_and_of_deepspeeds_own_states():
    model = nn.Linear(2, 1)  # 3 parameters of 4 bytes; trained, a copy and two states of 4 bytes for each
    sizes = choose_backend(launched(stage=2)).checkpoint_sizes(model, small_bytes=5)
    assert (sizes.weights, sizes.optimizer, sizes.other) == (12 + 2**16, 3 * 16 + RANK_BYTES, 5)
    model.bias.requires_grad_(False)
    assert choose_backend(launched(stage=2)).checkpoint_sizes(model, 5).optimizer == 2 * 16 + RANK_BYTES
    assert choose_backend(launched(stage=2, save_only_model=True)).checkpoint_sizes(model, 5).optimizer == 0


def test_an_optimizer_that_trainer_would_drop_under_deepspeed_is_refused():
    args = launched(stage=2).args
    check_given(args, (None, None))
    with pytest.raises(ArgumentError, match="optimizer_cls_and_kwargs"):
        check_given(args, (object(), None))
