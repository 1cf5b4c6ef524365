"""Blocks compiled in place: the same training, few graphs, plain checkpoints; with a cheap backend, on a CPU."""

import pytest
import torch
from compiled_runs import BLOCKS, compiled_trainer, evidence
from miniature_esm import make_wide_esm
from safetensors.torch import load_file
from tiny_masked_lm import largest_weight_difference, make_trainer, resumed_difference

from hf_ext.models.blocks import find_blocks

PACKED_BLOCKS = {"speedups": ["attention", "packing", "compile"]}


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_masked_lm.make_trainer", lambda folder, **given: compiled_trainer(folder, **given))
    assert resumed_difference(tmp_path, given=BLOCKS) == 0


# --- compilers that fail ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_inductor_ends_in_the_weights_of_stock_training(tmp_path):
    stock, compiled = make_trainer(tmp_path / "stock"), compiled_trainer(tmp_path / "run", "inductor")
    assert compiled.plan.applied("compile")
    for trainer in (stock, compiled):
        trainer.train()
    assert largest_weight_difference(compiled.model, stock.model) < 1e-5
