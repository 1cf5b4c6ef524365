"""Scores are sums over counts of all masked residues, and the baseline's numbers are those of a calculation by hand."""

import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from hf_ext.data.arguments import DataArguments
from hf_ext.errors import NotFiniteError
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.building import build_collator, build_model, build_tokenizer
from hf_ext.masked_lm.results import UnigramBaseline, compute_metrics, format_scores, score_splits, sum_rows


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
    rows = np.array([[4.0, 1, 1], [2.0, 3, 9]])
    scores = compute_metrics(EvalPrediction(rows, None))
    assert scores == {
        "token_loss": pytest.approx(0.6),
        "perplexity": pytest.approx(math.exp(0.6)),
        "accuracy": pytest.approx(0.4),
        "num_tokens": 10,
    }
    assert scores["token_loss"] != pytest.approx(np.mean([4.0 / 1, 2.0 / 9]))


def test_unigram_baseline_by_hand():
    # 5 of token 4 and 1 of token 5, one more for each of the 3 residues: 6/9, 2/9 and 1/9.
    baseline = UnigramBaseline(np.array([0, 0, 0, 0, 5, 1, 0]), np.array([4, 5, 6]))
    scores = baseline.score(np.array([[-100, 4, 4], [5, -100, 6]]))
    loss = -(2 * math.log(6 / 9) + math.log(2 / 9) + math.log(1 / 9)) / 4
    assert scores == {
        "token_loss": pytest.approx(loss),
        "perplexity": pytest.approx(math.exp(loss)),
        "accuracy": 0.5,
        "num_tokens": 4,
    }


def test_unigram_losses_of_rows_add_up_to_its_score():
    baseline = UnigramBaseline(np.array([0, 0, 0, 0, 5, 1, 0]), np.array([4, 5, 6]))
    labels = np.array([[-100, 4, 4], [5, -100, 6], [-100, -100, -100]])
    expected = [-2 * math.log(6 / 9), -math.log(2 / 9) - math.log(1 / 9), 0.0]
    assert baseline.row_losses(labels).tolist() == pytest.approx(expected)
    assert baseline.row_losses(labels).sum() / 4 == pytest.approx(baseline.score(labels)["token_loss"])


@pytest.mark.parametrize("streaming", [False, True])
def test_the_baseline_counts_training_residues(streaming):
    args = MaskedLMArguments(num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    collator = build_collator(build_tokenizer(args), build_model(args), args, DataArguments(), 0)
    rows = datasets.Dataset.from_dict({"sequence": ["LLLLA", "LG"]})
    baseline = UnigramBaseline.fit(rows.to_iterable_dataset() if streaming else rows, collator)
    # 26 letters count once more (20 standard, X, U, Z, O, B, and J as X): 25 tokens and 7 residues.
    assert np.exp(baseline.log_probabilities[[4, 5, 6, 7]]) == pytest.approx([6 / 32, 2 / 32, 2 / 32, 1 / 32])
    assert baseline.most_frequent == 4
    assert np.exp(baseline.log_probabilities).sum() == pytest.approx(1)
    assert baseline.log_probabilities[0] == -math.inf  # <cls> is never predicted


def test_the_table_shows_model_and_baseline():
    values = {"token_loss": 1.0, "perplexity": 2.718, "accuracy": 0.5, "num_tokens": 10}
    table = format_scores({"test": {"model": values, "unigram": values}})
    assert table.splitlines()[0].split() == ["split", "token_loss", "perplexity", "accuracy", "num_tokens"]
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["model", "unigram"]


def test_the_verdict_stands_above_the_table():
    values = {"token_loss": 1.0, "perplexity": 2.718, "accuracy": 0.5, "num_tokens": 10}
    verdict = {"text": "No better than unigram frequencies: ...", "is_better": False}
    lines = format_scores({"verdict": verdict, "test": {"model": values, "unigram": values}}).splitlines()
    assert lines[:2] == ["No better than unigram frequencies: ...", ""]
    assert [line.split()[1] for line in lines[4:]] == ["model", "unigram"]


def test_losses_that_are_no_numbers_get_no_score():
    output = SimpleNamespace(predictions=np.array([[1.0, 1.0, 2.0], [np.nan, 0.0, 1.0]]), label_ids=np.zeros((2, 2)))
    with pytest.raises(NotFiniteError, match="1 of 2 test rows"):
        score_splits(SimpleNamespace(predict=lambda rows: output), {"test": []}, None)
