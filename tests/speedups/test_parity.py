"""The proof of a kernel against the model's own: its bounds, what it catches, what it runs on, and its silence."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_rows
from token_rows import pad_rows
from torch import nn

from hf_ext.speedups import Run, parity
from hf_ext.speedups.sample import find_samples

ROWS, NAN = make_rows(), float("nan")
HALF, BF16 = {"dtype": torch.float16}, {"autocast": torch.bfloat16}
NOISE = "times the rounding noise of the old one (bound 2.0)"


def make_run(model=None, rows=ROWS, collator=pad_rows, bf16=False, fp16=False, fsdp=None, zero=None) -> Run:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": zero}})
    plugin = None if zero is None else SimpleNamespace(hf_ds_config=config)
    names = {"remove_unused_columns": True, "use_cache": False}
    args = SimpleNamespace(device="cpu", bf16=bf16, fp16=fp16, fsdp=fsdp, deepspeed_plugin=plugin, **names)
    return Run(args, make_wide_esm() if model is None else model, collator, rows)


def problem_of(judge, exact, before, after, autocast=None, dtype=torch.float32) -> str | None:
    states = [torch.tensor([values], dtype=torch.float32) for values in (exact, before, after)]
    return judge(*states, SimpleNamespace(autocast=autocast, dtype=dtype, least_scale=1.0)).problem


@pytest.mark.parametrize(
    ("exact", "before", "after", "how", "problem"),
    [
        ([1.0, 0.0], [1.0, 0.0], [1.0, 0.0002], {}, "states differ by 0.0002 (bound 0.0001)"),
        ([50.0, 0.0], [50.0, 0.0], [50.0, 0.0049], {}, None),  # relative to the largest state
        ([50.0, 0.0], [50.0, 0.0], [50.0, 0.0051], {}, "states differ by 0.0051 (bound 0.0001)"),
        ([1.0, 0.0], [1.0, 0.0], [1.0, NAN], {}, "states differ by nan (bound 0.0001)"),
        ([1.0, 0.0], [1.0, 0.01], [1.0, -0.0199], BF16, None),  # elsewhere, but no further from the exact result
        ([1.0, 0.0], [1.0, 0.01], [1.0, 0.021], BF16, f"2.1 {NOISE}"),
        ([1.0, 0.0], [1.0, 0.01], [1.0, NAN], BF16, f"nan {NOISE}"),
        ([1.0, 0.0], [1.0, 0.0], [1.0, 0.001], BF16, None),  # an old result that is exact by chance
        ([0.0, 0.0], [3.0, 4.0], [3.0, 4.24], HALF, None),  # 0.24 of 5
        ([0.0, 0.0], [3.0, 4.0], [3.0, 4.3], HALF, "states differ by 0.06 (bound 0.05)"),
    ],
)
def test_the_bound_on_states(exact, before, after, how, problem):
    assert problem_of(parity.judge_states, exact, before, after, **how) == problem


@pytest.mark.parametrize(
    ("before", "after", "how", "problem"),
    [
        ([3.0, 4.0], [3.0, 4.049], {}, None),  # 0.049 of 5
        ([3e-9, 4e-9], [3e-9, 4.1e-9], {}, "gradients differ by 0.02 (bound 0.01)"),  # however small they are
        ([3.0, 4.0], [3.0, NAN], {}, "gradients differ by nan (bound 0.01)"),
        ([3.0, NAN], [3.0, NAN], {}, None),  # the old ones overflow too
        ([3.0, 4.0], [3.0, 4.24], HALF, None),
        ([3.0, 4.0], [3.0, 4.3], HALF, "gradients differ by 0.06 (bound 0.05)"),
    ],
)
def test_the_bound_on_gradients(before, after, how, problem):
    assert problem_of(parity.judge_gradients, before, before, after, **how) == problem


def test_the_bound_on_gradients_under_autocast_is_the_rounding_noise_of_the_old_ones():
    for after, problem in (([1.0, -0.0199], None), ([1.0, 0.021], f"2.1 {NOISE}, in gradients")):
        assert problem_of(parity.judge_gradients, [1.0, 0.0], [1.0, 0.01], after, **BF16) == problem


# --- changes ---------------------------------------------------------------------------------------------------------


def reinitialise(model):
    nn.init.normal_(model.esm.encoder.layer[1].output.dense.weight)


def drop_hidden_states(model):
    model.esm.encoder.layer[0].output.dropout.p = 0.1


@pytest.mark.parametrize("change", [reinitialise, drop_hidden_states])
def test_a_change_of_weights_or_dropout_is_caught(change):
    run = make_run()
    found = parity.prove(run, lambda: change(run.model))
    assert found.problem == "a weight was replaced or re-initialised, or a dropout changed"


def scale_values(module, factor):
    dense = module.attention.self.value
    right = dense.forward
    dense.forward = lambda x: factor * right(x)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_that_computes_something_else_is_caught_in_every_encoder(bf16):
    pair = nn.ModuleDict({"first": make_wide_esm(seed=0).esm, "second": make_wide_esm(seed=1).esm})
    found = parity.prove(make_run(pair, bf16=bf16), lambda: scale_values(pair["second"].encoder.layer[0], 1.2))
    assert ("rounding noise" if bf16 else "states differ") in found.problem
    assert found.max_difference > 1e-3


def test_gradients_are_proven_of_encoders_that_train():
    assert parity.prove(make_run(), lambda: None).gradient_distance == 0.0
    frozen = make_wide_esm()
    frozen.requires_grad_(False)
    assert parity.prove(make_run(frozen), lambda: None).gradient_distance is None


def test_the_proof_leaves_mode_gradients_and_random_numbers_as_they_were():
    run = make_run(make_wide_esm(hidden_dropout_prob=0.5))
    state = torch.get_rng_state()
    for mode in (True, False):
        run.model.train(mode)
        assert parity.prove(run, lambda: None).max_difference == 0  # without dropout
        assert {module.training for module in run.model.modules()} == {mode}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in run.model.parameters())


# --- what it runs on -------------------------------------------------------------------------------------------------


def tokens(run) -> list[list[int]]:
    (probe,) = find_samples(run)
    return [ids[mask.bool()].tolist() for ids, mask in zip(probe.batch["input_ids"], probe.batch["attention_mask"])]


def test_it_runs_on_the_first_four_rows_or_on_tokens_that_are_made_up():
    assert tokens(make_run()) == [ROWS[i]["input_ids"] for i in range(4)]
    assert tokens(make_run(rows=ROWS.to_iterable_dataset())) == [ROWS[i]["input_ids"] for i in range(4)]
    for rows in (None, [{"text": "MKT"}]):
        assert [len(row) for row in tokens(make_run(rows=rows))] == [17, 33, 50, 64]
    assert [len(row) for row in tokens(make_run(make_wide_esm(vocab_size=10, mask_token_id=9)))] == [17, 33, 50, 64]


@pytest.mark.parametrize("given", [{"fsdp": True}, {"zero": 3}])
def test_a_model_that_will_be_sharded_is_not_put_on_one_device(given):
    assert find_samples(make_run(**given)) == []
    assert len(find_samples(make_run(zero=2))) == 1  # splits gradients alone


def test_towers_are_proven_in_the_precision_they_run_in(make_affinity, demo_rows):
    model, collator = make_affinity("full", "frozen")  # BERT and ESM
    model.config.encoder_autocast = "bfloat16"
    trained, frozen = find_samples(make_run(model, demo_rows, collator, fp16=True))
    assert (trained.autocast, frozen.autocast) == (torch.float16, torch.bfloat16)
