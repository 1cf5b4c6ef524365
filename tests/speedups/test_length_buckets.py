"""`--pad_to_multiple_of`: batches of few widths, the same rows and the same weights, and what it costs said."""

import pytest
import torch
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import PadsToMultiples, pad_rows

from hf_ext.data import STANDARD, MaskedLMCollator, ResidueTokenizer
from hf_ext.errors import PlanRefused
from hf_ext.speedups import describe_data
from hf_ext.trainer import FastTrainer

pytestmark = pytest.mark.internals


def train(folder, collator=None, **given):
    """A trainer that has trained, and the widths of its batches."""
    collator = collator or PadsToMultiples()
    widths = []
    trainer = FastTrainer(make_trainer(folder).model, make_args(folder, **given), collator, make_rows())
    trainer.model.register_forward_pre_hook(
        lambda model, inputs, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer.train()
    return trainer, widths


def test_few_widths_train_to_the_weights_of_as_many_as_there_are_and_the_collator_is_given_back(tmp_path):
    plain, widths = train(tmp_path / "plain")
    collator = PadsToMultiples()
    padded, rounded = train(tmp_path / "padded", collator, pad_to_multiple_of=16)
    assert rounded == [-(-width // 16) * 16 for width in widths] != widths
    assert largest_weight_difference(plain.model, padded.model) < 1e-6
    assert "% of a random batch is padding" in padded.plan["length_buckets"].reason
    assert collator.pad_to_multiple_of == 16
    padded.end()
    assert collator.pad_to_multiple_of is None


def test_a_killed_run_goes_on_with_another_multiple_to_the_same_weights(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole, _ = train(tmp_path / "whole", **saving)
    again = {**saving, "resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    resumed, widths = train(tmp_path / "resumed", pad_to_multiple_of=16, allow_changed=["collator"], **again)
    assert len(widths) == 2
    assert largest_weight_difference(whole.model, resumed.model) < 1e-6


def test_a_collator_that_pads_to_no_multiple_is_refused_before_anything_is_trained(tmp_path):
    args = make_args(tmp_path, pad_to_multiple_of=16)
    with pytest.raises(PlanRefused, match=r"--pad_to_multiple_of: function has no such attribute\."):
        FastTrainer(make_trainer(tmp_path).model, args, pad_rows, make_rows())


def test_our_tokenizers_pad_as_far_as_the_encoder_takes_and_masks_stay(demo_encoders):
    from transformers import EsmTokenizer

    tokenizer = EsmTokenizer.from_pretrained(demo_encoders[1])
    letters = STANDARD * 3
    rows = [{"sequence": letters[:size]} for size in (5, 11, 16)]
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
