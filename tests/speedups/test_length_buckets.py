"""`--pad_to_multiple_of`: batches of few widths, the same rows and the same weights, and what it costs said."""

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows
from token_rows import pad_rows
from transformers import DataCollatorForTokenClassification, EsmTokenizer

from hf_ext.data import STANDARD, MaskedLMCollator, ResidueTokenizer
from hf_ext.errors import PlanRefused
from hf_ext.speedups import describe_data
from hf_ext.trainer import FastTrainer


@pytest.fixture
def tokenizer(demo_encoders):
    return EsmTokenizer.from_pretrained(demo_encoders[1])


def test_few_widths_train_to_the_weights_of_as_many_as_there_are_and_the_collator_is_given_back(tmp_path, tokenizer):
    trained, widths = [], {None: [], 16: []}
    for multiple, seen in widths.items():
        collator, args = DataCollatorForTokenClassification(tokenizer), make_args(tmp_path, pad_to_multiple_of=multiple)
        trained.append(FastTrainer(make_wide_esm(), args, collator, make_rows()))
        assert collator.pad_to_multiple_of == multiple
        trained[-1].model.lm_head.register_forward_pre_hook(lambda head, states, to=seen: to.append(states[0].shape[1]))
        trained[-1].train()
    assert widths[16] == [-(-width // 16) * 16 for width in widths[None]] != widths[None]
    assert largest_weight_difference(trained[0].model, trained[1].model) < 1e-6
    assert "% of a random batch is padding" in trained[1].plan["length_buckets"].reason
    trained[1].end()
    assert collator.pad_to_multiple_of is None
    with pytest.raises(PlanRefused, match=r"--pad_to_multiple_of: function has no such attribute\."):
        FastTrainer(make_wide_esm(), args, pad_rows, make_rows())


def test_our_tokenizers_pad_as_far_as_the_encoder_takes_and_masks_stay(tokenizer):
    rows = [{"sequence": STANDARD[:size]} for size in (5, 11, 16)]
    plain, padded = (MaskedLMCollator(ResidueTokenizer(tokenizer), max_residues=20) for _ in range(2))
    padded.tokenizers["sequence"].pad_to_multiple_of = 8
    expected, found = plain(rows), padded(rows)
    assert (expected["input_ids"].shape[1], found["input_ids"].shape[1]) == (18, 22)  # 24, but for 20 + 2 that it takes
    for name, padding in (("input_ids", tokenizer.pad_token_id), ("labels", -100), ("attention_mask", 0)):
        assert torch.equal(found[name][:, :18], expected[name])
        assert (found[name][:, 18:] == padding).all()
    assert padded(rows[:2])["input_ids"].shape[1] == 16


def test_the_share_of_padding_is_that_of_rounded_batches():
    """Of rows of 3, 5 and 8 tokens in one batch: 24 places of which 16 hold a token; rounded to 16, 48."""
    rows = make_rows(3).select_columns(["length"]).map(lambda row, i: {"length": (3, 5, 8)[i]}, with_indices=True)
    for multiple, share in ((None, 1 / 3), (16, 2 / 3)):
        args = make_args(per_device_train_batch_size=3, pad_to_multiple_of=multiple)
        assert describe_data(rows, None, args).padding_share_random == pytest.approx(share)
