"""Compiled blocks and recomputed activations: the same training, few graphs, plain checkpoints, undone at the end."""

from dataclasses import replace

import pytest
import torch
from miniature_esm import make_wide_esm
from safetensors.torch import load_file
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer

BLOCKS = {"speedups": ["compile"]}


def compiled_trainer(folder, backend="eager", model=None, given=BLOCKS, dynamic=True, **others):
    """A trainer whose plan names another compiler than inductor: `eager` runs the same graphs as they are."""
    model, rows = make_wide_esm() if model is None else model, make_rows()
    plan = make_plan(make_args(folder, **given, **others), model, rows, pad_rows)
    found = plan["compile"]
    assert found.settings == {"dynamic": True, "mode": "default"}
    named = replace(found, settings={"dynamic": dynamic, "backend": backend})
    plan.decisions = [named if decision.name == "compile" else decision for decision in plan.decisions]
    return make_trainer(folder, model, rows, plan, **given, **others)


def count_graphs() -> int:
    """That torch compiled since it was reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


PACKED_BLOCKS = {"speedups": ["attention", "packing", "compile"]}


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def count_recompilations(folder, dynamic) -> int:
    """In 8 packed steps of at least 4 different lengths."""
    given = {"per_device_train_batch_size": 2, "max_steps": 8, "dynamic": dynamic}
    trainer = compiled_trainer(folder, given=PACKED_BLOCKS, **given)
    assert trainer.plan["packing"].settings["round_up"] is True
    lengths = set()
    # On the module around the blocks: a hook on a block would be compiled with it.
    trainer.model.esm.encoder.register_forward_pre_hook(lambda module, inputs: lengths.add(inputs[0].shape[1]))
    before = count_graphs()
    trainer.train()
    assert len(lengths) >= 4
    return count_graphs() - before


@pytest.mark.nightly
def test_packed_blocks_of_many_lengths_use_the_graphs_of_the_first_batch(tmp_path):
    assert count_recompilations(tmp_path / "dynamic", dynamic=True) <= 2
    assert count_recompilations(tmp_path / "static", dynamic=False) >= 4  # what the count would see


@pytest.mark.nightly
def test_names_in_the_state_dict_and_in_checkpoints_stay_as_they_are(tmp_path):
    names = set(make_wide_esm().state_dict())
    trainer = compiled_trainer(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    assert set(trainer.model.state_dict()) == names
    saved = set(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert names - saved == {"lm_head.decoder.weight"}  # tied to the embeddings
    assert saved <= names


@pytest.mark.nightly
def test_inductor_ends_in_the_weights_of_stock_training(tmp_path):
    stock, compiled = make_trainer(tmp_path / "stock"), compiled_trainer(tmp_path / "run", "inductor")
    assert compiled.plan.applied("compile")
    for trainer in (stock, compiled):
        trainer.train()
    assert largest_weight_difference(compiled.model, stock.model) < 1e-5


@pytest.mark.gpu
def test_on_a_card_compiled_packed_blocks_end_in_the_weights_of_stock_training(tmp_path):
    stock = make_trainer(tmp_path / "stock", use_cpu=False)
    compiled = make_trainer(tmp_path / "run", use_cpu=False, **PACKED_BLOCKS)
    assert compiled.plan.applied("compile")
    for trainer in (stock, compiled):
        trainer.train()
    assert largest_weight_difference(compiled.model, stock.model) < 1e-4


@pytest.mark.nightly
def test_a_mode_is_torchs_and_cuda_graphs_are_told_where_each_pass_begins(tmp_path, monkeypatch):
    """Decided for an A100; on a CPU torch compiles the same, and replays nothing."""
    seen, begun = [], []
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: seen.append(given) or compiled(self, **given))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    rows, stock = make_rows().remove_columns("length"), make_trainer(tmp_path / "stock")
    stock.train()
    for mode, passes in (("reduce-overhead", 4), ("max-autotune-no-cudagraphs", 0)):
        args, model = make_args(tmp_path / mode, **BLOCKS, compile_mode=mode), make_wide_esm()
        plan = make_plan(args, model, rows, pad_rows, describe_hardware("A100"))
        trainer = FastTrainer(model, args, pad_rows, rows, plan=plan)
        assert seen[-2:] == [{"dynamic": True, "mode": mode}] * 2
        trainer.train()
        trainer.end()
        trainer.model(**pad_rows(rows.select(range(2)).to_list()))
        assert len(begun) == passes
        assert largest_weight_difference(trainer.model, stock.model) < 1e-5
        begun.clear()


PACKED = {"speedups": ["attention", "packing"]}


@pytest.mark.nightly
@pytest.mark.parametrize("given", [PACKED, {}, {**PACKED, "attention": "padded"}])
def test_compiled_and_recomputed_is_the_run_without_either(tmp_path, given):
    blocks = {**given, "speedups": [*given.get("speedups", []), "compile"]}
    stock = make_trainer(tmp_path / "stock", **given)
    trainer = compiled_trainer(tmp_path / "run", "aot_eager", given=blocks, activation_checkpointing=True)
    assert trainer.plan.applied("compile")
    before = count_graphs()
    first = trainer.model.esm.encoder.layer[0]
    assert first._compiled_call_impl is None  # the checkpoint stands around what is compiled
    assert first.attention._compiled_call_impl is not None
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-6
    assert count_graphs() == before
    trainer.end()
    assert first.attention._compiled_call_impl is None


COMPILED = {  # what is computed again -> parts of the first layer and of the second one that are compiled
    "attention": (["attention.self", "attention.output", "intermediate", "output"],) * 2,
    "feed_forward": (["attention", "intermediate", "output"],) * 2,
    "2": (["attention", "intermediate", "output"], [""]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("again", COMPILED)
def test_parts_that_are_computed_again_are_compiled_within_their_checkpoint(tmp_path, again):
    blocks = {**PACKED, "speedups": [*PACKED["speedups"], "compile"]}
    stock = make_trainer(tmp_path / "stock", **PACKED)
    given = {"given": blocks, "activation_checkpointing": again}
    trainer = compiled_trainer(tmp_path / "run", "aot_eager", **given)
    layers = trainer.model.esm.encoder.layer[:2]
    assert trainer.plan.applied("activation_checkpointing")
    for layer, expected in zip(layers, COMPILED[again], strict=True):
        found = [name for name, part in layer.named_modules() if part._compiled_call_impl is not None]
        assert sorted(found) == sorted(expected)
    before = count_graphs()
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-6
    assert count_graphs() == before
