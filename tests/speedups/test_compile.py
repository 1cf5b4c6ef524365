"""Blocks compiled in place: the same training, few graphs, plain checkpoints; with a cheap backend, on a CPU."""

import copy
from dataclasses import replace

import pytest
import torch
from compiled_runs import BLOCKS, compiled_trainer, evidence
from miniature_esm import make_wide_esm
from safetensors.torch import load_file
from tiny_encoders import esm_encoder, make_batch, packed, tiny_t5
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer, resumed_difference
from token_rows import pad_rows

from hf_ext.errors import PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.attention import KERNELS
from hf_ext.models.blocks import find_blocks
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, Run, compile
from hf_ext.speedups.compile import compile_blocks, uncompile_blocks

PACKED_BLOCKS = {"speedups": ["attention", "packing", "compile"]}
ESM = ModelFacts(("esm",), blocks="2 EsmLayer")
FROZEN = ModelFacts(("esm",), ("heavy",), trains_encoders=False)


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# --- decisions -------------------------------------------------------------------------------------------------------


def decide(hardware="A100", model=None, **given):
    args = make_args(**{"speedups": ["all"], **given})
    return compile.decide(Context(describe_hardware(hardware), args, model or ESM))


KEPT_PRODUCTS = "compiled code writes into the products that --activation_policy pointwise keeps: use attention or half"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"activation_policy": "pointwise"}, KEPT_PRODUCTS),
        ({"torch_compile": True}, "--torch_compile compiles the whole model"),
        ({"attention": "faesm"}, "faesm's attention is not compiled"),
        ({"attention": "flex"}, "flex attention is compiled by itself, and was not tried inside of compiled blocks"),
        ({"hardware": "sm61"}, "sm61 is older than Triton's 7.0"),
        ({"hardware": "mps"}, "no compiler for mps"),
        ({"model": ModelFacts(("bert",))}, "the model has no repeated layers: name them with --block_pattern"),
        ({"model": FROZEN}, "no encoder trains: blocks run once per distinct sequence"),
    ],
)
def test_a_conflict_is_skipped_among_all_and_refused_by_name(given, reason):
    among_all, by_name = decide(**given), decide(**given, speedups=["all", "compile"])
    assert (among_all.status, among_all.reason) == ("skipped", reason)
    assert (by_name.status, by_name.reason) == ("refused", reason)


@pytest.mark.parametrize("policy", ["half", "attention", "full"])
def test_blocks_that_are_computed_again_are_compiled(policy):
    assert decide(activation_policy=policy).status == "applied"
    assert decide(activation_checkpointing=True).status == "applied"


def test_a_refused_conflict_stops_the_run(tmp_path):
    with pytest.raises(PlanRefused, match="compile: compiled code writes into the products"):
        make_trainer(tmp_path, activation_policy="pointwise", **BLOCKS)


@pytest.mark.parametrize("hardware", ["T4", "V100", "A100"])
@pytest.mark.parametrize("blocks", ["33 EsmLayer", "12 GPT2Block"])
def test_gpus_with_triton_compile_the_blocks_of_any_model(hardware, blocks):
    decision = decide(hardware, ModelFacts(blocks=blocks))
    assert (decision.status, decision.settings) == ("applied", {"dynamic": True})
    assert decision.reason == f"{blocks}, block by block on {describe_hardware(hardware).name}"


def test_a_cpu_compiles_only_when_named():
    assert decide("cpu").status == "skipped"
    assert decide("cpu", speedups=["all", "compile"]).status == "applied"


def test_compile_is_off_where_it_is_not_asked_for():
    assert decide(speedups=[]).status == "off"
    assert decide(without=["compile"]).status == "off"


# --- training --------------------------------------------------------------------------------------------------------


def test_compiled_training_ends_in_the_weights_of_stock_training(tmp_path):
    stock, compiled = make_trainer(tmp_path / "stock"), compiled_trainer(tmp_path / "compiled", "aot_eager")
    assert [block._compiled_call_impl is None for block in find_blocks(compiled.model)] == [False, False]
    start = evidence(compiled)
    assert start["blocks"] == 2
    assert start["graphs"] >= 1
    stock.train()
    compiled.train()
    assert largest_weight_difference(compiled.model, stock.model) < 1e-6
    found = evidence(compiled)
    assert found.keys() == {"blocks", "graphs", "compile_s", "recompilations", "recompile_s"}
    assert found["graphs"] == start["graphs"]
    assert found["recompilations"] == 0


def scale_first_output(graph, inputs):
    """A compiler with a mistake."""

    def run(*args):
        first, *others = graph(*args)
        return (first * 1.1, *others)

    return run


@pytest.mark.nightly
def test_the_comparison_sees_a_compiler_with_a_mistake(tmp_path):
    stock, compiled = make_trainer(tmp_path / "stock"), compiled_trainer(tmp_path / "bad", scale_first_output)
    stock.train()
    compiled.train()
    assert largest_weight_difference(compiled.model, stock.model) > 1e-4


def count_recompilations(folder, dynamic) -> int:
    """In 8 packed steps of at least 4 different lengths."""
    given = {"per_device_train_batch_size": 2, "max_steps": 8, "dynamic": dynamic}
    trainer = compiled_trainer(folder, given=PACKED_BLOCKS, **given)
    assert trainer.plan["packing"].settings["round_up"] is True
    lengths = set()
    # On the module around the blocks: a hook on a block would be compiled with it.
    trainer.model.esm.encoder.register_forward_pre_hook(lambda module, inputs: lengths.add(inputs[0].shape[1]))
    trainer.train()
    assert len(lengths) >= 4
    return evidence(trainer)["recompilations"]


def first_block(model, batch):
    """A block, and what it is given in a pass."""
    block, given = find_blocks(model)[0], []
    handle = block.register_forward_pre_hook(lambda module, *inputs: given.append(inputs), with_kwargs=True)
    model(**batch)
    handle.remove()
    return block, *given[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "kernel", "graphs"),
    [(esm_encoder, "padded", 1), (esm_encoder, "varlen", 1), (tiny_t5, "padded", 1), (esm_encoder, "blocked", 2)],
)
def test_the_compiler_sees_a_packed_block_as_one_graph(monkeypatch, make, kernel, graphs):
    """But with `blocked`, which it leaves alone. `varlen` has no kernel for CPUs: here it is one without padding."""
    monkeypatch.setitem(KERNELS, "varlen", lambda q, k, v, segments, *others: v * segments.cu_seqlens[-1])
    block, args, kwargs = first_block(packed(make(), kernel, round_up=True), make_batch())
    found = torch._dynamo.explain(block)(*args, **kwargs)
    assert (found.graph_count >= graphs, found.graph_break_count > 0) == (True, graphs > 1)


@pytest.mark.nightly
def test_packed_blocks_of_many_lengths_use_the_graphs_of_the_first_batch(tmp_path):
    assert count_recompilations(tmp_path / "dynamic", dynamic=True) <= 2
    assert count_recompilations(tmp_path / "static", dynamic=False) >= 4  # what the count would see


@pytest.mark.nightly
def test_counting_goes_on_past_the_64_that_torch_lists():
    measure = compile.count_graphs()
    for width in range(70):
        torch.compile(lambda x, width=width: x + width, backend="eager")(torch.zeros(2))
        torch.compiler.reset()
    assert measure()["graphs"] == 70
    assert compile.count_graphs()()["graphs"] == 0


@pytest.mark.nightly
def test_a_second_run_counts_its_own_graphs(tmp_path):
    first = compiled_trainer(tmp_path / "first")
    second = compiled_trainer(tmp_path / "second")
    assert evidence(first)["graphs"] >= 1
    assert evidence(second)["graphs"] == 0  # the same blocks: the first run's graphs serve
    second.train()
    assert evidence(second)["recompilations"] == 0


@pytest.mark.nightly
def test_names_in_the_state_dict_and_in_checkpoints_stay_as_they_are(tmp_path):
    names = set(make_wide_esm().state_dict())
    trainer = compiled_trainer(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    assert set(trainer.model.state_dict()) == names
    saved = set(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert names - saved == {"lm_head.decoder.weight"}  # tied to the embeddings
    assert saved <= names


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_masked_lm.make_trainer", lambda folder, **given: compiled_trainer(folder, **given))
    assert resumed_difference(tmp_path, given=BLOCKS) == 0


def test_the_first_pass_leaves_no_gradient_and_draws_no_number(tmp_path):
    model = make_wide_esm(hidden_dropout_prob=0.1)
    state = torch.get_rng_state()
    args = make_args(tmp_path, **BLOCKS)
    plan = make_plan(args, model, make_rows(), pad_rows)
    named = replace(plan["compile"], settings={"dynamic": True, "backend": "eager"})
    assert compile.apply(named, Run(args, model, pad_rows, make_rows())).status == "applied"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())
    assert model.training


def test_copies_run_uncompiled_on_their_own_weights():
    model = make_wide_esm()
    assert compile_blocks(model, backend="eager") == 2
    twin, stock = copy.deepcopy(model), make_wide_esm()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        batch = pad_rows(make_rows(3))
        assert torch.allclose(twin(**batch).logits, stock(**batch).logits, atol=1e-6)
    uncompile_blocks(model)
    assert [block._compiled_call_impl for block in find_blocks(model)] == [None, None]


# --- compilers that fail ---------------------------------------------------------------------------------------------


def failing(graph, inputs):
    raise RuntimeError("no compiler here\nand more")


@pytest.mark.nightly
def test_a_compiler_that_fails_is_left_out_with_the_reason_and_training_works(tmp_path):
    stock = make_trainer(tmp_path / "stock", speedups=["attention", "packing"])
    trainer = compiled_trainer(tmp_path / "run", failing, given=PACKED_BLOCKS)
    decision = trainer.plan["compile"]
    assert decision.status == "skipped"
    assert decision.reason.startswith("compilation failed: BackendCompilerFailed: ")
    assert "no compiler here" in decision.reason
    assert "\n" not in decision.reason
    assert [block._compiled_call_impl for block in find_blocks(trainer.model)] == [None, None]
    assert trainer.model.esm.packed_round_up is False  # rows are filled up for compiled blocks only
    assert all(weight.grad is None for weight in trainer.model.parameters())
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(trainer.model, stock.model) == 0
    assert evidence(trainer) == {}


@pytest.mark.nightly
def test_off_and_end_leave_blocks_uncompiled(tmp_path):
    assert [block._compiled_call_impl for block in find_blocks(make_trainer(tmp_path).model)] == [None, None]
    trainer = compiled_trainer(tmp_path, "eager")
    trainer.end()
    assert [block._compiled_call_impl for block in find_blocks(trainer.model)] == [None, None]


@pytest.mark.nightly
def test_inductor_ends_in_the_weights_of_stock_training(tmp_path):
    stock, compiled = make_trainer(tmp_path / "stock"), compiled_trainer(tmp_path / "run", "inductor")
    assert compiled.plan.applied("compile")
    for trainer in (stock, compiled):
        trainer.train()
    assert largest_weight_difference(compiled.model, stock.model) < 1e-5
