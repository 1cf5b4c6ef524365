"""Models of named or given shape, ESM-2's tokenizer from its 33 tokens, and arguments that contradict each other."""

import datasets
import pytest
import torch
from transformers import EsmForMaskedLM, TrainingArguments

from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError, DataError
from hf_ext.masked_lm.arguments import SIZES, MaskedLMArguments
from hf_ext.masked_lm.building import (
    build_collator,
    build_model,
    build_tokenizer,
    make_demo_sequences,
    prepare_splits,
)
from hf_ext.tasks.running import stock_arguments
from hf_ext.training_args import FastTrainingArguments

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        *(("esm2_8M", 7.5), ("esm2_35M", 33.5), ("esm2_150M", 148), ("esm2_650M", 651), ("esm2_3B", 2839)),
        # Of published names; 333 = 30 x (4 x 960^2 + 3 x 960 x 2560) and a head.
        *(("esmc_300M", 333), ("esmc_600M", 575), ("esmc_6B", 6344)),
    ],
)
def test_named_sizes_have_the_parameters_of_the_published_models(size, millions):
    with torch.device("meta"):
        model = build_model(MaskedLMArguments(model_size=size))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_a_new_model_is_built_as_esm2():
    config = build_model(MaskedLMArguments(**TINY)).config
    assert (config.vocab_size, config.pad_token_id, config.mask_token_id) == (33, 1, 32)
    assert (config.position_embedding_type, config.token_dropout, config.emb_layer_norm_before) == (
        "rotary",
        True,
        False,
    )
    assert (config.intermediate_size, config.layer_norm_eps, config.hidden_dropout_prob) == (64, 1e-5, 0.0)


def test_a_new_esm_c_is_built_as_published():
    config = build_model(MaskedLMArguments(model_size="esmc_600M", **TINY)).config
    assert (config.model_type, config.vocab_size, config.pad_token_id, config.mask_token_id) == ("esmc", 64, 1, 32)
    assert (config.intermediate_size, config.hidden_act, config.attention_dropout) == (256, "silu", 0.0)
    assert MaskedLMArguments(model_size="esmc_6B").shape["intermediate_size"] == 6912


def test_the_tokenizer_of_a_new_esm_c_is_its_own(tmp_path):
    tokenizer = build_tokenizer(MaskedLMArguments(model_size="esmc_300M"))
    assert tokenizer("MKT<mask>X")["input_ids"] == [0, 20, 15, 11, 32, 24, 2]
    assert tokenizer.model_max_length == 2048
    tokenizer.save_pretrained(tmp_path)
    again = build_tokenizer(MaskedLMArguments(model_name_or_path=str(tmp_path)))
    assert (again.get_vocab(), again.model_max_length) == (tokenizer.get_vocab(), 2048)


def test_single_sizes_override_a_named_one():
    shape = MaskedLMArguments(model_size="esm2_8M", num_hidden_layers=2, intermediate_size=99).shape
    assert shape == {"num_hidden_layers": 2, "hidden_size": 320, "num_attention_heads": 20, "intermediate_size": 99}


def test_the_tokenizer_of_a_new_model_is_esm2s(tmp_path):
    tokenizer = build_tokenizer(MaskedLMArguments(**TINY))
    # As facebook/esm2_t6_8M_UR50D's vocab.txt gives them.
    assert tokenizer("MKT<mask>X")["input_ids"] == [0, 20, 15, 11, 32, 24, 2]
    assert (len(tokenizer), tokenizer.model_max_length) == (33, 1024)
    tokenizer.save_pretrained(tmp_path)
    again = build_tokenizer(MaskedLMArguments(model_name_or_path=str(tmp_path)))
    assert again.get_vocab() == tokenizer.get_vocab()


def test_training_continues_from_saved_weights(tmp_path):
    torch.manual_seed(1)
    model = build_model(MaskedLMArguments(**TINY))
    model.half().save_pretrained(tmp_path)
    again = build_model(MaskedLMArguments(model_name_or_path=str(tmp_path)))
    assert isinstance(again, EsmForMaskedLM)
    assert again.dtype == torch.float32
    saved = model.state_dict()
    assert all(torch.equal(weight, saved[name].float()) for name, weight in again.state_dict().items())
    assert not again.esm.contact_head.regression.weight.requires_grad


def test_an_encoder_without_a_language_model_head_gets_a_new_one(demo_encoders):
    assert isinstance(build_model(MaskedLMArguments(model_name_or_path=demo_encoders[1])), EsmForMaskedLM)
    with pytest.raises(ArgumentError, match="lacks weights"):
        build_model(MaskedLMArguments(model_name_or_path=demo_encoders[0]))  # BERT's head, without its weights


def test_the_shorter_limit_counts_and_loading_learns_of_it():
    model, tokenizer = build_model(MaskedLMArguments(**TINY)), build_tokenizer(MaskedLMArguments(**TINY))
    for asked, expected in ((None, 1022), (100, 100), (5000, 1022)):
        data_args = DataArguments(max_residues=asked, too_long="truncate")
        assert build_collator(tokenizer, model, MaskedLMArguments(), data_args, 0).max_residues == expected
        assert data_args.max_residues == expected


def test_demo_sequences_are_distinct():
    sequences = make_demo_sequences()["sequence"][:]
    assert len(sequences) == len(set(sequences)) == 739


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_size": "esm2_9M"}, "esm2_8M"),
        ({"model_name_or_path": "x", "model_size": "esm2_8M", "hidden_size": 8}, "leave model_size, hidden_size out"),
        ({"model_revision": "main"}, "--model_name_or_path"),
        ({"mlm_probability": 0.0}, "above 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        MaskedLMArguments(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "What to train"),
        ({"hidden_size": 64}, "num_hidden_layers, num_attention_heads are missing"),
        ({"num_hidden_layers": 1, "hidden_size": 18, "num_attention_heads": 2}, "even width"),
        ({"model_name_or_path": "absent/folder/x"}, "no masked language model there"),
    ],
)
def test_models_that_cannot_be_built_are_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        build_model(MaskedLMArguments(**given))
    esm2 = {"esm2_8M", "esm2_35M", "esm2_150M", "esm2_650M", "esm2_3B"}
    assert set(SIZES) == esm2 | {"esmc_300M", "esmc_600M", "esmc_6B"}


@pytest.mark.parametrize(
    ("given", "message"),
    [({"too_long": "window", "max_residues": 9}, "window"), ({"sequence_columns": ["a", "b", "c"]}, "two that form")],
)
def test_inputs_that_cannot_be_masked_are_refused(given, message):
    model, tokenizer = build_model(MaskedLMArguments(**TINY)), build_tokenizer(MaskedLMArguments(**TINY))
    with pytest.raises(ArgumentError, match=message):
        build_collator(tokenizer, model, MaskedLMArguments(), DataArguments(**given), 0)


def make_args(tmp_path, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)


def test_stock_arguments_are_plain_and_keep_their_values(tmp_path):
    args = make_args(tmp_path, speedups=["all"], learning_rate=3e-4, eval_strategy="steps", eval_steps=0.1, seed=5)
    plain = stock_arguments(args, frozenset({"preset", "learning_rate"}), remove_unused_columns=False)
    assert type(plain) is TrainingArguments
    assert (plain.learning_rate, plain.eval_steps, plain.seed, plain.remove_unused_columns) == (3e-4, 0.1, 5, False)


def test_the_stock_trainer_refuses_speedups_that_were_asked_for(tmp_path):
    with pytest.raises(ArgumentError, match="effective_batch_size, speedups"):
        stock_arguments(
            make_args(tmp_path, speedups=["tf32"], effective_batch_size=16),
            frozenset({"speedups", "effective_batch_size", "seed"}),
        )


def test_a_stream_needs_max_steps_and_evaluation_needs_rows(tmp_path):
    rows = datasets.Dataset.from_dict({"sequence": ["MKT"]})
    with pytest.raises(ArgumentError, match="--max_steps"):
        prepare_splits({"train": rows.to_iterable_dataset()}, make_args(tmp_path), {}, stock=False)
    with pytest.raises(ArgumentError, match="no validation split"):
        prepare_splits({"train": rows}, make_args(tmp_path, eval_strategy="epoch"), {}, stock=False)


def test_evaluation_streams_are_read_once_and_must_have_rows(tmp_path):
    rows = datasets.Dataset.from_dict({"sequence": ["MKT", "LAG"]})
    splits = {"train": rows, "validation": rows.to_iterable_dataset()}
    ready = prepare_splits(splits, make_args(tmp_path), {}, stock=False)
    assert ready["validation"][:] == {"sequence": ["MKT", "LAG"], "mask_epoch": [-1, -1]}
    splits["validation"] = splits["validation"].filter(lambda row: False)
    with pytest.raises(DataError, match="validation part of the stream has no rows"):
        prepare_splits(splits, make_args(tmp_path), {}, stock=False)
