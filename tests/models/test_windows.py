"""Proteins longer than an encoder takes, in windows: where these begin, what overlaps become, and that nothing else is
another one's."""

import hashlib

import numpy as np
import pytest
import torch
from accelerate.utils import find_batch_size
from datasets import Dataset
from labelled_rows import make_labelled, make_trainer
from tiny_affinity import make_model
from tiny_encoders import packed

from hf_ext.data import WINDOWS, DataArguments, Limit, check_inputs, cut_batch, join_windows
from hf_ext.embeddings import EmbeddingStore
from hf_ext.errors import ArgumentError, DataError
from hf_ext.memory import affinity_batch
from hf_ext.models import find_encoders
from hf_ext.property import AffinityPredictor, build_collator
from hf_ext.tasks import read_lengths

LIMIT = 8  # residues: windows overlap by 2 and begin every 6
LONG = "MKTAYIAKDDGGMEVQL"  # 17 residues: windows at 0, 6 and 9
SHORT, FULL = "EVQ", "DIQMTQSP"
FAR = 0.01


def reads_in_windows(made):
    """A model and its collator, whose encoder takes `LIMIT` residues."""
    model, collator = made
    for tokenizer in collator.tokenizers.values():
        tokenizer.max_residues = LIMIT
    collator.too_long = "window"
    return model.eval(), collator


@pytest.fixture
def residues(demo_encoders):
    """A model of a class for each residue, and its collator."""
    return reads_in_windows(make_labelled("residue_classes", demo_encoders[1]))


def average_by_hand(model, collator, sequence, starts=(0, 6, 9)):
    """States of a protein, (residues, width): each window alone and unpadded, then the mean of those that have it."""
    (name,) = collator.tokenizers
    states = [[] for _ in sequence]
    for start in starts:
        batch = collator.tokenizers[name]([sequence[start : start + LIMIT]])
        ids, mask = batch["input_ids"], batch["attention_mask"]
        (found,) = find_encoders(model)[0](input_ids=ids, attention_mask=mask).last_hidden_state
        for i, state in enumerate(found[1:-1]):
            states[start + i].append(state)
    return torch.stack([torch.stack(each).mean(0) for each in states])


def test_windows_begin_in_equal_steps_and_the_last_ends_with_the_protein():
    limit = Limit.make(LIMIT, True)
    assert limit == (8, 2)
    cases = {3: [0], 8: [0], 9: [0, 1], 14: [0, 6], 15: [0, 6, 7], 17: [0, 6, 9], 20: [0, 6, 12]}
    assert {length: limit.starts(length) for length in cases} == cases
    read, windows = limit.reads(np.array([*cases]))
    assert windows.tolist() == [1, 1, 2, 2, 3, 3, 3]
    assert read.tolist() == [3, 8, 16, 16, 24, 24, 24]
    assert Limit.make(LIMIT, False).reads(np.array([3, 20]))[0].tolist() == [3, 8]
    assert Limit.make(None, True).starts(10_000) == [0]


def test_states_in_overlaps_are_averaged_and_each_special_token_is(residues):
    _, collator = residues
    batch = collator.encode("chain", [SHORT, "MKTAYIAKDDG"])  # 11 residues: windows at 0 and 3
    assert batch["input_ids"].shape == (3, 10)
    assert find_batch_size({"sequences": {"chain": batch}}) == 2  # rows, as Trainer counts them
    states = torch.tensor([5.0, 1.0, 2.0]).view(3, 1, 1).expand(3, 10, 4)
    joined, masks = join_windows(states, batch)
    expected = torch.tensor([[5.0] * 5 + [0] * 8, [1.5] + [1] * 3 + [1.5] * 5 + [2] * 3 + [1.5]])
    assert torch.equal(joined, expected[:, :, None].expand(2, 13, 4))
    assert torch.equal(masks["attention_mask"], expected > 0)
    assert masks["residue_mask"].sum(1).tolist() == [3, 11]


def test_what_fits_is_read_as_ever_and_a_pair_is_cut_as_ever(residues, demo_encoders):
    _, collator = residues
    batch = collator.encode("chain", [FULL, SHORT])
    expected = collator.tokenizers["chain"]([FULL, SHORT])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    pair = build_collator(
        make_model(demo_encoders[:1], inputs=[[["heavy", "light"]]]), DataArguments(too_long="window")
    )
    pair.tokenizers["heavy+light"].max_residues = LIMIT
    assert WINDOWS not in pair.encode("heavy+light", [LONG], [SHORT])
    rows = [{"heavy": LONG, "light": SHORT}]
    assert "Their ends are cut off; 12 residues" in check_inputs(pair, {"train": rows})["heavy+light"]["cut"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_states_and_predictions_of_a_long_protein_are_those_of_its_windows(residues, is_packed, blocked_in_float32):
    model, collator = residues
    with torch.no_grad():
        expected = average_by_hand(model, collator, LONG)
        wrong = average_by_hand(model, collator, LONG, (0, 5, 9))
        if is_packed:
            packed(model.encoders["0"])
        batch = collator.encode("chain", [SHORT, LONG])
        states = model.encode("chain", batch)[len(SHORT) :]
        logits = model(sequences={"chain": batch}).logits[1]
        predicted = model._loss.to_logits(model.head(expected))
    assert len(states) == len(LONG)
    assert (states - expected).abs().max() < 2e-5
    assert (logits - predicted).abs().max() < 2e-5
    assert (states - wrong).abs().max() > FAR
    alone = AffinityPredictor(model, collator, device="cpu").predict([{"chain": LONG}, {"chain": LONG[:6]}])
    assert [len(one) for one in alone] == [17, 6]


@pytest.mark.parametrize("pooling", ["mean", "mean_tokens", "cls", "max"])
def test_every_pooling_reads_a_long_protein_as_one(demo_encoders, pooling):
    model, collator = reads_in_windows(make_labelled("numbers", demo_encoders[1], pooling=[pooling]))
    with torch.no_grad():
        both = model.encode("chain", collator.encode("chain", [SHORT, LONG]))
        expected = average_by_hand(model, collator, LONG)
        short = model.encode("chain", collator.encode("chain", [SHORT]))
    assert (both[:1] - short).abs().max() < 1e-5
    if pooling in ("mean", "max"):
        by_hand = expected.mean(0) if pooling == "mean" else expected.amax(0)
        assert (both[1] - by_hand).abs().max() < 1e-5


def test_the_gradient_of_a_long_protein_is_that_of_its_windows_averaged(demo_encoders):
    model, collator = reads_in_windows(make_labelled("residue_classes", demo_encoders[1], "lora"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    row = {"chain": LONG, "label": [i % 3 for i in range(len(LONG))]}

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    ours = gradients(model(**collator([row])).loss)
    targets = torch.tensor(row["label"])

    def by_hand(starts):
        return torch.nn.functional.cross_entropy(model.head(average_by_hand(model, collator, LONG, starts)), targets)

    expected, wrong = gradients(by_hand((0, 6, 9))), gradients(by_hand((0, 5, 9)))
    assert expected.norm() > 0.01
    assert (ours - expected).norm() < 1e-4 * expected.norm()
    assert (ours - wrong).norm() > FAR * expected.norm()


def test_a_batch_that_is_cut_keeps_the_windows_of_a_protein_together(demo_encoders):
    model = make_model(demo_encoders[1:] * 2, "full")
    model, collator = reads_in_windows(
        (model, build_collator(model, DataArguments(sequence_columns=["heavy", "light"], missing_chains=["light"])))
    )
    lights = [LONG, "", SHORT, LONG + SHORT]
    rows = [{"heavy": LONG[i:], "light": light, "label": float(i)} for i, light in enumerate(lights)]
    batch = collator(rows)
    whole = model(**batch, num_items_in_batch=4)
    parts = [model(**part, num_items_in_batch=4) for part in cut_batch(batch, 2)]
    assert len(parts) == 2
    assert (whole.logits - torch.cat([part.logits for part in parts])).abs().max() < 1e-5
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), rel=1e-5)


def test_a_store_takes_no_way_to_read_a_long_protein_for_another(tmp_path):
    ways = [(None,), (LIMIT,), (LIMIT, 2), (LIMIT, 1), (LIMIT + 1, 2)]
    for number, way in enumerate(ways):
        store = EmbeddingStore(tmp_path, {"encoder": "one"}, *way)
        assert store.missing([LONG]) == [LONG]
        assert store.missing([FULL]) == ([] if number else [FULL])  # what fits is the same in all ways
        new = store.missing([FULL, LONG])
        store.add(new, torch.full((len(new), 2), float(number)))
    cut = hashlib.blake2b(LONG.encode() + b" truncate 8", digest_size=16).digest()
    assert EmbeddingStore(tmp_path, {"encoder": "one"}, LIMIT)._keys([LONG])[0] == cut  # as stores on disks have it
    for number, way in enumerate(ways):
        found = EmbeddingStore(tmp_path, {"encoder": "one"}, *way).gather([LONG, FULL])
        assert found.tolist() == [[number] * 2, [0, 0]]


def test_cached_and_live_predictions_agree(demo_encoders, tmp_path):
    found = {}
    for speedups in ([], ["embedding_cache"]):
        trainer = make_trainer("residue_classes", tmp_path, demo_encoders[1], "frozen", speedups=speedups)
        reads_in_windows((trainer.model, trainer.data_collator))
        trainer.train()
        found[len(speedups)] = trainer.predict(trainer.eval_dataset).predictions
        assert trainer.plan.applied("embedding_cache") == bool(speedups)
    lengths = [len(row["chain"]) for row in trainer.eval_dataset]
    assert max(lengths) > LIMIT
    assert found[0].shape[1] == max(lengths)
    assert np.abs(found[0] - found[1]).max() < 2e-2  # states are stored in float16


def test_encoders_without_a_table_of_positions_read_longer_ones_as_they_are(demo_encoders):
    bert, esm = demo_encoders
    collator = build_collator(make_model([esm]), DataArguments(too_long="window"), 3000)
    assert collator.encode("heavy", ["A" * 2000])["input_ids"].shape == (1, 2002)
    with pytest.raises(ArgumentError, match=r"--max_length 3000: .* has positions for 512 tokens"):
        build_collator(make_model([bert]), DataArguments(), 3000)


def test_the_cost_is_said_and_what_a_dry_run_counts_is_what_a_batch_holds(residues, monkeypatch):
    model, collator = residues
    rows = [{"chain": LONG}, {"chain": FULL}, {"chain": FULL}, {"chain": SHORT}]
    report = check_inputs(collator, {"train": rows})["chain"]
    # 24 residues are read of 17: 7 more of 36.
    assert report["windows"].endswith("overlap by 2 residues or more, 19.44% more residues in all.")
    assert "1 of 3 sequences (1 of 4 rows)" in report["windows"]
    assert "cut" not in report
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 1)
    assert check_inputs(collator, {"train": Dataset.from_list(rows)})["chain"] == report
    lengths = read_lengths({"train": rows}, {"chain": ["chain"]}, {"chain": Limit(8, 2)})
    assert (lengths.windows, lengths.most_windows, lengths.longest) == ({"chain": 1.5}, {"chain": 3}, {"chain": 10})
    assert lengths.mean["chain"] * 1.5 * 4 == pytest.approx(collator.count_tokens(rows).sum())
    foreseen = affinity_batch(lengths.longest, {}, 2, model.config.kind.of_rows, lengths.most_windows)
    made = collator.encode("chain", [LONG, LONG])
    assert foreseen["sequences"]["chain"]["input_ids"].shape == made["input_ids"].shape
    collator.too_long = "error"
    with pytest.raises(DataError, match="Use --too_long window, or"):
        check_inputs(collator, {"train": rows})
