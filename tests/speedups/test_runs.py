"""Speed-ups that leave learning as it is: a run ends in the weights of one without, goes on exactly, is undone."""

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_trainer, resumed_difference

PACKED = {"speedups": ["attention", "packing"]}
SAME = {  # what switches it on, and the entry of the plan that has to be applied
    "attention": {"speedups": ["attention"]},
    "packing": PACKED,
    "masked_lm_head": {"speedups": ["masked_lm_head"]},
    "fused_gelu": {"speedups": ["fused_gelu"]},
    "activation_checkpointing": {"activation_policy": "attention"},
}
ALL = {"speedups": ["all"], "without": ["precision", "cpu_matmul", "cpu_threads", "compile"]}
CONTINUED = {
    "packing": PACKED,
    "masked_lm_head": SAME["masked_lm_head"],
    "muon": {"speedups": "muon", "learning_rate": 1e-3, "gradient_accumulation_steps": 2},
    "token_budget": {**PACKED, "max_tokens_per_batch": 100},
    "all": ALL,
}


def own_parts(model) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", SAME)
def test_a_run_ends_in_the_weights_of_one_without_and_the_model_is_as_it_was(tmp_path, name):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    stock, other = make_trainer(tmp_path / "stock", **split), make_trainer(tmp_path / "o", learning_rate=0.09, **split)
    ours = make_trainer(tmp_path / "ours", **split, **SAME[name])
    assert ours.plan.applied(name)
    for trainer in (stock, ours, other):
        trainer.train()
    assert largest_weight_difference(ours.model, stock.model) < 1e-6
    assert largest_weight_difference(other.model, stock.model) > 1e-3  # what the comparison would see
    ours.end()
    assert not any("forward" in own for own in own_parts(ours.model).values())
    assert ours.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, name):
    assert resumed_difference(tmp_path, **CONTINUED[name]) == 0


def test_other_rows_would_be_seen(tmp_path):
    assert resumed_difference(tmp_path, seed=4, allow_changed=["seed"], **PACKED) > 1e-3


def test_off_means_untouched(tmp_path):
    model = make_wide_esm()
    before = own_parts(model)
    make_trainer(tmp_path, model)
    assert own_parts(model) == before
