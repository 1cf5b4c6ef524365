"""Masks are a function of seed, epoch and example; shares are ESM's; special tokens are never touched."""

import datasets
import numpy as np
import pytest
import torch
from transformers import BertTokenizer, DataCollatorForLanguageModeling, EsmTokenizer

from hf_ext.data import STANDARD, MaskedLMCollator, ResidueTokenizer, mark_evaluation
from hf_ext.errors import DataError

MASK = 32


@pytest.fixture(scope="module")
def esm(demo_encoders) -> EsmTokenizer:
    return EsmTokenizer.from_pretrained(demo_encoders[1])


@pytest.fixture(scope="module")
def make_collator(esm):
    def make(**settings) -> MaskedLMCollator:
        return MaskedLMCollator(ResidueTokenizer(esm), **settings)

    return make


def random_rows(num: int, low: int = 5, high: int = 60, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    return [{"sequence": "".join(rng.choice(list(STANDARD), rng.integers(low, high)))} for _ in range(num)]


def per_row(batch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every row, without padding."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [(i[:n].tolist(), x[:n].tolist()) for i, x, n in zip(batch["input_ids"], batch["labels"], lengths)]


def collate_in_batches(collator, rows, size: int) -> list[tuple[list[int], list[int]]]:
    return [row for i in range(0, len(rows), size) for row in per_row(collator(rows[i : i + size]))]


def test_masks_do_not_depend_on_batch_or_order_and_those_of_transformers_do(make_collator, esm):
    rows, ours, theirs = random_rows(40), make_collator(seed=1), DataCollatorForLanguageModeling(esm, seed=1)
    tokenized = [{"input_ids": esm(row["sequence"])["input_ids"]} for row in rows]
    found = [
        collate_in_batches(collator, given, 7) == collate_in_batches(collator, given[::-1], 3)[::-1]
        for collator, given in ((ours, rows), (theirs, tokenized))
    ]
    assert found == [True, False]


def test_masks_differ_between_epochs_seeds_and_examples(make_collator):
    rows = [{"sequence": "MKTAYIAKQRQISFVKSHFSRQLEERLGLIE" * 4}]
    collator = make_collator()
    first = per_row(collator(rows))
    collator.set_epoch(1)
    assert per_row(collator(rows)) != first
    collator.set_epoch(0)
    assert per_row(collator(rows)) == first
    assert per_row(make_collator(seed=1)(rows)) != first


def test_labels_are_the_residues_that_were_chosen(make_collator):
    # L A G V are the tokens 4 5 6 7 of ESM, <cls> 0, <eos> 2, <pad> 1.
    batch = make_collator(mlm_probability=1.0)([{"sequence": "LAGV"}, {"sequence": "VG"}])
    assert batch["labels"].tolist() == [[-100, 4, 5, 6, 7, -100], [-100, 7, 6, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert batch["input_ids"][:, 0].tolist() == [0, 0]
    assert batch["input_ids"][0, 5] == 2
    assert batch["input_ids"][1, 3:].tolist() == [2, 1, 1]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_shares_are_those_of_esm(make_collator, esm):
    rows = random_rows(1000, 100, 101)
    plain = ResidueTokenizer(esm)([row["sequence"] for row in rows])["input_ids"].numpy()
    batch = make_collator()(rows)
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    chosen = labels != -100
    num = chosen.sum()
    assert num == pytest.approx(15_000, abs=3 * (100_000 * 0.15 * 0.85) ** 0.5)
    assert (labels[chosen] == plain[chosen]).all()
    assert (ids[~chosen] == plain[~chosen]).all()
    masked = (ids[chosen] == MASK).mean()
    changed = ((ids[chosen] != MASK) & (ids[chosen] != plain[chosen])).mean()
    # A random residue is the true one once in 20 times: 9.5 % differ from it and 10.5 % do not.
    for share, expected in ((masked, 0.8), (changed, 0.095), (1 - masked - changed, 0.105)):
        assert share == pytest.approx(expected, abs=3 * (expected * (1 - expected) / num) ** 0.5)
    counts = np.bincount(ids[chosen & (ids != MASK) & (ids != plain)], minlength=33)
    table = esm.convert_tokens_to_ids(list(STANDARD))  # all of which replace alike
    assert sorted(counts.nonzero()[0].tolist()) == sorted(table)
    assert abs(counts[table] - counts.sum() / 20).max() < 4 * (counts.sum() / 20) ** 0.5


def test_every_sequence_has_something_to_predict_and_no_special_token_is_touched(make_collator):
    batch = make_collator(mlm_probability=0.01)(random_rows(200, 1, 4))
    assert ((batch["labels"] != -100).sum(1) >= 1).all()
    assert (batch["input_ids"][:, 0] == 0).all()
    assert (batch["labels"] > 3)[batch["labels"] != -100].all()
    ends = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][torch.arange(200), ends] == 2).all()


def test_long_sequences_are_cropped_anew_in_each_epoch_to_neighbouring_residues(make_collator, esm):
    long, short = "".join(letter * 10 for letter in STANDARD), "MKTAYIAKQR"
    collator, small = make_collator(max_residues=20), make_collator(max_residues=4, mlm_probability=1.0)
    crops, seen = set(), set()
    for epoch in range(60):
        collator.set_epoch(epoch)
        together, alone = collator([{"sequence": long}, {"sequence": short}]), collator([{"sequence": long}])
        assert together["input_ids"].shape == (2, 22)
        assert torch.equal(together["input_ids"][:1], alone["input_ids"])
        assert together["attention_mask"].sum(1).tolist() == [22, 12]
        crops.add(tuple(together["labels"][0].tolist()))
        small.set_epoch(epoch)
        labels = small([{"sequence": "ACDEFG"}])["labels"][0, 1:-1]
        seen.add("".join(esm.convert_ids_to_tokens(labels.tolist())))
    assert len(crops) > 55
    assert seen == {"ACDE", "CDEF", "DEFG"}  # both ends are reached


def test_pairs_are_masked_in_both_parts(demo_encoders):
    tokenizer = ResidueTokenizer(BertTokenizer.from_pretrained(demo_encoders[0]), num_chains=2)
    collator = MaskedLMCollator(tokenizer, ["heavy", "light"], mlm_probability=1.0, max_residues=6)
    batch = collator([{"heavy": "ACD", "light": "EF"}])
    assert collator.columns == {"heavy+light": ["heavy", "light"]}
    assert (batch["labels"][0] != -100).tolist() == [False, True, True, True, False, True, True, False]
    with pytest.raises(DataError, match="7 residues"):
        collator([{"heavy": "ACDE", "light": "FGH"}])


def test_evaluation_sets_are_masked_alike_in_every_epoch(make_collator):
    rows = datasets.Dataset.from_list(random_rows(8))
    for marked in map(mark_evaluation, (rows, rows.to_iterable_dataset())):
        collator = make_collator()
        first, training = per_row(collator(list(marked))), per_row(collator(list(rows)))
        collator.set_epoch(3)
        assert per_row(collator(list(marked))) == first != training
