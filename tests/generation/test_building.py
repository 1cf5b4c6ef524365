"""Rows as tokens, batches within a budget of both sides' tokens, and states of a frozen encoder computed once."""

import shutil

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from tiny_generators import AFFINITIES, ANTIGENS, HEAVIES, LIGHTS

from hf_ext.data.batching import TokenBudgetBatchSampler, count_tokens
from hf_ext.data.demo import make_demo_pairs
from hf_ext.errors import ArgumentError
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.building import Inputs, build_inputs, build_model, fill_in_demo
from hf_ext.generation.generator import load_generator
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.preparing import PairData
from hf_ext.generation.results import GatesFailed, check_passed, count_validation_falls
from hf_ext.generation.sampling import sample_pairs
from hf_ext.models.generation.esm import PretrainedEncoder
from hf_ext.training_args import FastTrainingArguments

ROWS = AntibodyRows.of_columns(HEAVIES, LIGHTS, ANTIGENS)
TINY = {"d_model": 16, "d_ff": 24, "hidden_size": 12, "num_heads": 2, "size": "tiny"}


def make_data(has_affinities: bool = False) -> PairData:
    train = make_demo_pairs(20)
    if has_affinities:
        train = train.add_column("label", [6.0, 8.0] * 10)
    return PairData(DatasetDict({"train": train}), "antigen", "heavy", "light", has_affinities, {})


def make_training(tmp_path, **given) -> FastTrainingArguments:
    cache = {"embedding_cache_dir": str(tmp_path / "cache"), "disable_tqdm": True}
    return FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **cache, **given)


def test_rows_become_token_columns_and_a_budget_holds_for_antigens_and_antibodies_together():
    inputs = Inputs()
    tokens = inputs.tokenize(ROWS, [7.0 if one is None else one for one in AFFINITIES])
    assert tokens.column_names == ["input_ids", "labels", "affinity", "length"]
    assert np.isnan(inputs.tokenize(ROWS)["affinity"][:]).all()
    # An antigen of 18 with two framing tokens; 9 and 5 residues, a separator and an end; and so on.
    counted = count_tokens(tokens, inputs.collator)
    assert counted.tolist() == [[20, 16], [5, 4], [20, 9], [9, 12]]
    assert tokens["length"][:] == counted.sum(1).tolist()
    for batch in TokenBudgetBatchSampler(counted, 72, seed=0):
        made = inputs.collator([tokens[i] for i in batch])
        assert made["labels"].numel() + len(batch) * made["input_ids"].shape[1] <= 72


def test_affinities_of_training_set_the_scale_of_the_model_and_adapters_are_asked_for_where_they_are(tmp_path):
    args = GeneratorArguments(**TINY)
    config = build_model(args, make_training(tmp_path), make_data(has_affinities=True)).config
    assert (config.label_mean, config.label_std, config.unknown_affinity_dropout) == (7.0, 1.0, 0.1)
    assert build_model(args, make_training(tmp_path), make_data()).config.unknown_affinity_dropout == 0.0
    with pytest.raises(ArgumentError, match="--encoder_training lora"):
        build_model(args, make_training(tmp_path, use_peft=True), make_data())


def test_the_demo_keeps_what_the_user_gave(tmp_path):
    args, training = GeneratorArguments(hidden_size=24), make_training(tmp_path)
    fill_in_demo(args, training, frozenset({"hidden_size"}))
    assert (args.hidden_size, args.d_model, training.learning_rate) == (24, None, 5e-5)
    args = GeneratorArguments()
    fill_in_demo(args, training, frozenset({"learning_rate"}))
    assert (args.hidden_size, args.attend, training.learning_rate) == (64, True, 5e-5)


def test_a_frozen_encoder_reads_each_antigen_once_and_batches_carry_its_states(tmp_path, demo_encoders, monkeypatch):
    args = GeneratorArguments(architecture="esm", antigen_encoder=demo_encoders[1], **TINY)
    training, data = make_training(tmp_path), make_data()
    model = build_model(args, training, data)
    read: list[int] = []
    plain = PretrainedEncoder.forward

    def count(self, input_ids, *given, **named):
        read.append(len(input_ids))
        return plain(self, input_ids, *given, **named)

    monkeypatch.setattr(PretrainedEncoder, "forward", count)
    antigens = data.antibodies("train").antigens
    inputs = build_inputs(model, training, [*antigens, *antigens])
    assert sum(read) == 20
    tokens = inputs.tokenize(data.antibodies("train"))
    batch = inputs.collator([tokens[i] for i in range(4)])
    with torch.no_grad():
        live = model.encode(batch["encoder_outputs"][0].new_tensor(tokens["input_ids"][:4]).long())
    torch.testing.assert_close(batch["encoder_outputs"][0], live.last_hidden_state)
    assert "input_ids" not in batch
    build_inputs(model, training, antigens)
    assert sum(read) == 20 + 4  # those of the comparison; the second time all were there


@pytest.mark.parametrize("training_of_encoder", ["full", "lora"])
def test_a_generator_whose_encoder_trained_needs_nothing_but_its_folder(tmp_path, demo_encoders, training_of_encoder):
    encoder = shutil.copytree(demo_encoders[1], tmp_path / "encoder")
    args = GeneratorArguments(
        architecture="esm", antigen_encoder=str(encoder), encoder_training=training_of_encoder, **TINY
    )
    training, data = make_training(tmp_path / "run"), make_data()
    model = build_model(args, training, data).eval()
    inputs = build_inputs(model, training, [])
    model.save_pretrained(tmp_path / "model")
    inputs.collator.save_pretrained(tmp_path / "model")
    settings = {"num_samples": 2, "seed": 3, "max_new_tokens": 12, "show_progress": False}
    expected = sample_pairs(model, inputs.antigen_tokenizer, ANTIGENS, **settings)
    shutil.rmtree(encoder)
    loaded = load_generator(tmp_path / "model", device="cpu")
    assert sample_pairs(loaded.model, loaded.tokenizer, ANTIGENS, **settings) == expected


def test_evaluations_that_fall_below_all_before_are_counted():
    for losses, falls in (((3.0, 2.0, 2.5, 2.25, 1.5), 2.0), ((2.0, 2.5, 2.25), 0.0), ((2.0,), 0.0)):
        history = [{"eval_token_loss": loss} for loss in losses] + [{"loss": 1.0}]
        assert count_validation_falls(history) == falls
    assert count_validation_falls([{"loss": 1.0}]) is None


def test_a_failed_gate_ends_with_what_failed():
    gates = [{"name": "valid", "passed": False, "reason": "0.2; at least 0.5 is needed"}]
    results = {"stage": 1, "gates": gates, "settings": {"output_dir": "out"}}
    with pytest.raises(GatesFailed, match=r"Stage 1 .* \(valid: 0.2; at least 0.5 is needed\)") as failed:
        check_passed({**results, "gates_passed": False})
    assert failed.value.exit_code == 1
    check_passed({**results, "gates_passed": True})
