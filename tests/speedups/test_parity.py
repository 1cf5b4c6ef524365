"""The proof itself: what it lets pass, what it catches, what it runs on, and that it leaves no trace."""

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

ROWS = make_rows()


def make_run(model=None, rows=ROWS, collator=pad_rows, bf16=False, fp16=False, fsdp=None, zero=None) -> Run:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": zero}})
    plugin = None if zero is None else SimpleNamespace(hf_ds_config=config)
    names = {"block_pattern": None, "remove_unused_columns": True, "use_cache": False}
    args = SimpleNamespace(device="cpu", bf16=bf16, fp16=fp16, fsdp=fsdp, deepspeed_plugin=plugin, **names)
    return Run(args, make_wide_esm() if model is None else model, collator, rows)


# --- bounds ----------------------------------------------------------------------------------------------------------


def compare(exact, before, after, autocast=None, dtype=torch.float32) -> parity.Parity:
    states = [torch.tensor([values], dtype=torch.float32) for values in (exact, before, after)]
    return parity.judge_states(*states, of_encoder(autocast, dtype))


def of_encoder(autocast=None, dtype=torch.float32):
    """What bounds depend on."""
    return SimpleNamespace(autocast=autocast, dtype=dtype, least_scale=1.0)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ([50.0, 0.0], [50.0, 0.0049], None),  # relative to the largest state
        ([50.0, 0.0], [50.0, 0.0051], "states differ by 0.0051 (bound 0.0001)"),
        ([1.0, 0.0], [1.0, float("nan")], "states differ by nan (bound 0.0001)"),
    ],
)
def test_the_bound_in_float32(before, after, problem):
    assert compare(before, before, after).problem == problem


@pytest.mark.parametrize(
    ("after", "ratio", "problem"),
    [
        ([1.0, -0.0199], 1.99, None),  # elsewhere, but no further from the exact result
        ([1.0, 0.021], 2.1, "2.1 times the rounding noise of the old one (bound 2.0)"),
        ([1.0, float("nan")], None, "nan times the rounding noise of the old one (bound 2.0)"),
    ],
)
def test_the_bound_under_autocast_is_the_rounding_noise_of_the_old_attention(after, ratio, problem):
    found = compare([1.0, 0.0], [1.0, 0.01], after, torch.bfloat16)
    assert found.problem == problem
    assert ratio is None or found.noise_ratio == pytest.approx(ratio, rel=1e-4)


def test_the_bound_for_weights_in_half_precision():
    assert compare([0.0, 0.0], [3.0, 4.0], [3.0, 4.24], dtype=torch.float16).problem is None  # 0.24 of 5
    assert compare([0.0, 0.0], [3.0, 4.0], [3.0, 4.3], dtype=torch.float16).problem == (
        "states differ by 0.06 (bound 0.05)"
    )


def compare_gradients(exact, before, after, autocast=None, dtype=torch.float32) -> parity.Parity:
    gradients = [torch.tensor([values], dtype=torch.float32) for values in (exact, before, after)]
    return parity.judge_gradients(*gradients, of_encoder(autocast, dtype))


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ([3.0, 4.0], [3.0, 4.049], None),  # 0.049 of 5
        ([3.0, 4.0], [3.0, 4.1], "gradients differ by 0.02 (bound 0.01)"),
        ([3.0, 4.0], [3.0, NAN], "gradients differ by nan (bound 0.01)"),
        ([3.0, NAN], [3.0, NAN], None),  # the old ones overflow too
    ],
)
def test_the_bound_on_gradients_in_float32_is_relative(before, after, problem):
    assert compare_gradients(before, before, after).problem == problem


def test_the_bound_on_gradients_under_autocast_and_in_half_precision():
    ends = "times the rounding noise of the old one (bound 2.0), in gradients"
    for after, problem in (([1.0, -0.0199], None), ([1.0, 0.021], f"2.1 {ends}"), ([1.0, NAN], f"nan {ends}")):
        assert compare_gradients([1.0, 0.0], [1.0, 0.01], after, torch.bfloat16).problem == problem
    assert compare_gradients([3.0, 4.0], [3.0, 4.0], [3.0, 4.24], dtype=torch.float16).problem is None
    problem = compare_gradients([3.0, 4.0], [3.0, 4.0], [3.0, 4.3], dtype=torch.float16).problem
    assert problem == "gradients differ by 0.06 (bound 0.05)"


def test_gradients_are_proven_of_encoders_that_train_on_two_rows_cut_short():
    assert parity.prove(make_run(), lambda: None).gradient_distance == 0.0
    frozen = make_wide_esm()
    frozen.requires_grad_(False)
    assert parity.prove(make_run(frozen), lambda: None).gradient_distance is None
    rows = [{"input_ids": [4] * length, "labels": [4] * length} for length in (50, 300, 300)]
    (probe,) = find_samples(make_run(rows=rows))
    assert probe.gradients(None).shape == (50 + 100, probe.module.config.hidden_size)


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
def test_a_layer_that_computes_something_else_is_caught(bf16):
    run = make_run(bf16=bf16)
    found = parity.prove(run, lambda: scale_values(run.model.esm.encoder.layer[0], 1.2))
    assert "rounding noise" in found.problem if bf16 else "states differ" in found.problem
    assert found.max_difference > 1e-3


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


def test_it_runs_on_the_first_four_rows():
    assert tokens(make_run()) == [ROWS[i]["input_ids"] for i in range(4)]
    assert tokens(make_run(rows=ROWS.select(range(2)))) == [ROWS[i]["input_ids"] for i in range(2)]
    assert tokens(make_run(rows=ROWS.to_iterable_dataset())) == [ROWS[i]["input_ids"] for i in range(4)]


@pytest.mark.parametrize("rows", [None, [{"text": "MKT"}]], ids=["none", "text"])
def test_it_runs_on_made_up_tokens_where_the_data_does_not_say_how_to_make_them(rows):
    assert [len(row) for row in tokens(make_run(rows=rows))] == [17, 33, 50, 64]
    assert tokens(make_run(rows=rows)) == tokens(make_run(rows=rows))


def test_a_collator_of_text_makes_the_tokens():
    class TextCollator:
        columns = {"sequence": ["sequence"]}

        def __call__(self, rows):
            return pad_rows(
                [{"input_ids": [4] * len(row["sequence"]), "labels": [4] * len(row["sequence"])} for row in rows]
            )

    rows = [{"sequence": "MKT"}, {"sequence": "MKTAY"}]
    assert tokens(make_run(rows=rows, collator=TextCollator())) == [[4] * 3, [4] * 5]


def test_every_encoder_of_a_model_is_proven():
    pair = nn.ModuleDict({"first": make_wide_esm(seed=0).esm, "second": make_wide_esm(seed=1).esm})
    run = make_run(pair)
    assert [probe.module for probe in find_samples(run)] == [pair["first"], pair["second"]]
    assert "states differ" in parity.prove(run, lambda: scale_values(pair["second"].encoder.layer[0], 1.2)).problem


@pytest.mark.parametrize("given", [{"fsdp": True}, {"zero": 3}])
def test_a_model_that_will_be_sharded_is_not_put_on_one_device(given):
    assert find_samples(make_run(**given)) == []
    assert len(find_samples(make_run(zero=2))) == 1  # splits gradients alone


def test_towers_are_proven_in_the_precision_they_run_in(make_affinity, demo_rows):
    model, collator = make_affinity("full", "frozen")  # BERT and ESM
    model.config.encoder_autocast = "bfloat16"
    trained, frozen = find_samples(make_run(model, demo_rows, collator, fp16=True))
    assert (trained.autocast, frozen.autocast, frozen.num_rows) == (torch.float16, torch.bfloat16, 4)
    model, collator = make_affinity("full", "full")
    for trained in find_samples(make_run(model, demo_rows, collator, bf16=True)):
        assert trained.autocast == torch.bfloat16
    assert find_samples(make_run(model, None, collator)) == []
