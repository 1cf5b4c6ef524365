"""Models of named or given shape and their tokenizers; scores are sums over counts of masked residues, by hand."""

import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from inside import MaskedLMArguments, build_masked_lm, build_masked_lm_collator, build_tokenizer, prepare_splits
from transformers import EsmForMaskedLM, EvalPrediction, TrainingArguments

from hf_ext.data import DataArguments
from hf_ext.errors import ArgumentError, DataError, NotFiniteError
from hf_ext.masked_lm import compute_metrics, sum_rows
from hf_ext.masked_lm.results import UnigramBaseline, score_split
from hf_ext.tasks import stock_arguments
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
TINY = {"model_size": "demo"}


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
        model = build_masked_lm(MaskedLMArguments(model_size=size))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_a_new_model_is_built_as_esm2_or_esm_c_are():
    config = build_masked_lm(MaskedLMArguments(**TINY)).config
    assert (config.vocab_size, config.pad_token_id, config.mask_token_id) == (33, 1, 32)
    assert (config.position_embedding_type, config.token_dropout, config.emb_layer_norm_before) == (
        "rotary",
        True,
        False,
    )
    assert (config.intermediate_size, config.layer_norm_eps, config.hidden_dropout_prob) == (256, 1e-5, 0.0)
    with torch.device("meta"):
        config = build_masked_lm(MaskedLMArguments(model_size="esmc_300M")).config
    assert (config.model_type, config.vocab_size, config.pad_token_id, config.mask_token_id) == ("esmc", 64, 1, 32)
    assert (config.intermediate_size, config.hidden_act, config.attention_dropout) == (2560, "silu", 0.0)


@pytest.mark.parametrize(("given", "limit"), [(TINY, 1024), ({"model_size": "esmc_300M"}, 2048)])
def test_the_tokenizer_of_a_new_model_is_that_of_its_family(tmp_path, given, limit):
    tokenizer = build_tokenizer(MaskedLMArguments(**given))
    # As facebook/esm2_t6_8M_UR50D's vocab.txt gives them.
    assert tokenizer("MKT<mask>X")["input_ids"] == [0, 20, 15, 11, 32, 24, 2]
    assert tokenizer.model_max_length == limit
    tokenizer.save_pretrained(tmp_path)
    again = build_tokenizer(MaskedLMArguments(model_name_or_path=str(tmp_path)))
    assert (again.get_vocab(), again.model_max_length) == (tokenizer.get_vocab(), limit)


def test_training_continues_from_saved_weights(tmp_path):
    torch.manual_seed(1)
    model = build_masked_lm(MaskedLMArguments(**TINY))
    model.half().save_pretrained(tmp_path)
    again = build_masked_lm(MaskedLMArguments(model_name_or_path=str(tmp_path)))
    assert isinstance(again, EsmForMaskedLM)
    assert again.dtype == torch.float32
    saved = model.state_dict()
    assert all(torch.equal(weight, saved[name].float()) for name, weight in again.state_dict().items())
    assert not again.esm.contact_head.regression.weight.requires_grad


def test_an_encoder_without_a_language_model_head_gets_a_new_one(demo_encoders):
    assert isinstance(build_masked_lm(MaskedLMArguments(model_name_or_path=demo_encoders[1])), EsmForMaskedLM)
    with pytest.raises(ArgumentError, match=r"--use_peft: .* has no language-model head"):
        build_masked_lm(MaskedLMArguments(model_name_or_path=demo_encoders[1]), for_lora=True)
    with pytest.raises(ArgumentError, match="lacks weights"):
        build_masked_lm(MaskedLMArguments(model_name_or_path=demo_encoders[0]))  # BERT's head, without its weights


def test_the_shorter_limit_counts_and_loading_learns_of_it():
    model, tokenizer = build_masked_lm(MaskedLMArguments(**TINY)), build_tokenizer(MaskedLMArguments(**TINY))
    for asked, expected in ((None, 1022), (100, 100), (5000, 1022)):
        data_args = DataArguments(max_residues=asked, too_long="truncate")
        assert build_masked_lm_collator(tokenizer, model, MaskedLMArguments(), data_args, 0).max_residues == expected
        assert data_args.max_residues == expected


def test_what_cannot_be_trained_is_refused():
    model, tokenizer = build_masked_lm(MaskedLMArguments(**TINY)), build_tokenizer(MaskedLMArguments(**TINY))
    for given, message in (
        ({"model_size": "esm2_9M"}, "esm2_8M"),
        ({"model_name_or_path": "x", "model_size": "esm2_8M"}, "leave model_size out"),
        ({"model_revision": "main"}, "--model_name_or_path"),
        ({"mlm_probability": 0.0}, "above 0"),
        ({}, "What to train"),
        ({"model_name_or_path": "absent/folder/x"}, "no masked language model there"),
    ):
        with pytest.raises(ArgumentError, match=message):
            build_masked_lm(MaskedLMArguments(**given))
    with pytest.raises(ArgumentError, match="two that form"):
        build_masked_lm_collator(
            tokenizer, model, MaskedLMArguments(), DataArguments(sequence_columns=["a", "b", "c"]), 0
        )


def make_args(tmp_path, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)


def test_arguments_of_the_stock_trainer_are_plain_and_speedups_that_were_asked_for_are_refused(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 0.1, "seed": 5, "effective_batch_size": 16}
    args = make_args(tmp_path, speedups=["all"], learning_rate=3e-4, **given)
    plain = stock_arguments(args, frozenset({"preset", "learning_rate"}), remove_unused_columns=False)
    assert type(plain) is TrainingArguments
    assert (plain.learning_rate, plain.eval_steps, plain.seed, plain.remove_unused_columns) == (3e-4, 0.1, 5, False)
    with pytest.raises(ArgumentError, match="effective_batch_size, speedups"):
        stock_arguments(args, frozenset({"speedups", "effective_batch_size", "seed"}))


def test_a_stream_needs_max_steps_and_evaluations_need_rows_which_are_read_once(tmp_path):
    rows = datasets.Dataset.from_dict({"sequence": ["MKT", "LAG"]})
    with pytest.raises(ArgumentError, match="--max_steps"):
        prepare_splits({"train": rows.to_iterable_dataset()}, make_args(tmp_path), {}, stock=False)
    with pytest.raises(ArgumentError, match="no validation split"):
        prepare_splits({"train": rows}, make_args(tmp_path, eval_strategy="epoch"), {}, stock=False)
    splits = {"train": rows, "validation": rows.to_iterable_dataset()}
    ready = prepare_splits(splits, make_args(tmp_path), {}, stock=False)
    assert ready["validation"][:] == {"sequence": ["MKT", "LAG"], "mask_epoch": [-1, -1]}
    splits["validation"] = splits["validation"].filter(lambda row: False)
    with pytest.raises(DataError, match="validation part of the stream has no rows"):
        prepare_splits(splits, make_args(tmp_path), {}, stock=False)


def certain(ids: list[int], probability: float) -> torch.Tensor:
    """Logits (tokens, 4) that give token i the probability, the other three the rest in equal parts."""
    rest = (1 - probability) / 3
    return torch.tensor([[math.log(probability if i == j else rest) for j in range(4)] for i in ids])


def test_rows_are_summed_over_masked_residues_only():
    logits = torch.stack([certain([0, 1, 2], 0.7), certain([3, 3, 3], 0.4)])
    labels = torch.tensor([[0, -100, 3], [-100, 3, -100]])
    sums = sum_rows(logits, labels)
    # Row 0: right with 0.7, wrong with 0.1. Row 1: right with 0.4.
    expected = [[-math.log(0.7) - math.log(0.1), 1, 2], [-math.log(0.4), 1, 1]]
    assert sums.tolist() == [pytest.approx(row) for row in expected]
    assert torch.equal(sum_rows((logits, None), labels), sums)


def test_metrics_weigh_every_residue_alike_and_a_mean_of_batch_means_does_not():
    scores = compute_metrics(EvalPrediction(np.array([[4.0, 1, 1], [2.0, 3, 9]]), None))
    expected = {"token_loss": 0.6, "perplexity": math.exp(0.6), "accuracy": 0.4, "num_tokens": 10}
    assert scores == pytest.approx(expected)
    assert scores["token_loss"] != pytest.approx(np.mean([4.0 / 1, 2.0 / 9]))


def test_unigram_baseline_by_hand_and_its_losses_of_rows():
    # 5 of token 4 and 1 of token 5, one more for each of the 3 residues: 6/9, 2/9 and 1/9.
    baseline = UnigramBaseline(np.array([0, 0, 0, 0, 5, 1, 0]), np.array([4, 5, 6]))
    labels = np.array([[-100, 4, 4], [5, -100, 6], [-100, -100, -100]])
    losses = [-2 * math.log(6 / 9), -math.log(2 / 9) - math.log(1 / 9), 0.0]
    assert baseline.sum_rows(labels).tolist() == [pytest.approx(row) for row in zip(losses, [2, 0, 0], [2, 2, 0])]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_baseline_counts_training_residues(streaming):
    args = MaskedLMArguments(**TINY)
    collator = build_masked_lm_collator(build_tokenizer(args), build_masked_lm(args), args, DataArguments(), 0)
    rows = datasets.Dataset.from_dict({"sequence": ["LLLLA", "LG"]})
    baseline = UnigramBaseline.fit(rows.to_iterable_dataset() if streaming else rows, collator)
    # 26 letters count once more (20 standard, X, U, Z, O, B, and J as X): 25 tokens and 7 residues.
    assert np.exp(baseline.log_probabilities[[4, 5, 6, 7]]) == pytest.approx([6 / 32, 2 / 32, 2 / 32, 1 / 32])
    assert baseline.most_frequent == 4
    assert np.exp(baseline.log_probabilities).sum() == pytest.approx(1)
    assert baseline.log_probabilities[0] == -math.inf  # <cls> is never predicted


def test_losses_that_are_no_numbers_get_no_score():
    output = SimpleNamespace(predictions=np.array([[1.0, 1.0, 2.0], [np.nan, 0.0, 1.0]]), label_ids=np.zeros((2, 2)))
    with pytest.raises(NotFiniteError, match="1 of 2 test rows"):
        score_split(SimpleNamespace(predict=lambda rows: output), [], "test", None)
