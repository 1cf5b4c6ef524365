"""A training step that asks its device for nothing: on torch's meta device, where every read is an error."""

import pytest
import torch
from accelerate.utils import send_to_device
from miniature_esm import MASK
from tiny_encoders import packed, tiny_esm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EsmTokenizer

from hf_ext.data.masking import MaskedLMCollator
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.data.varlen_layout import LayoutMaker, change_layout
from hf_ext.speedups.fused_layers import label_only

ROWS = [{"sequence": text} for text in ("MKTAYIAKQR", "GSHMLE", "MKLVV", "ACDEFGHIKLMNPQRSTVWY")]


@pytest.fixture
def collator(demo_encoders) -> MaskedLMCollator:
    return MaskedLMCollator(ResidueTokenizer(EsmTokenizer.from_pretrained(demo_encoders[1])), mlm_probability=0.3)


class CountCopies(TorchDispatchMode):
    """Counts tensors that are carried from the host to the device; a pageable copy waits for all that was asked."""

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        devices = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and "cpu" in devices:
            self.copies += 1
        return result


def make_model(round_up=False):
    model = packed(tiny_esm(num_hidden_layers=2), "padded", round_up).train()
    assert label_only(model) == 1
    return model


def step(model, batch):
    """One training step as Trainer makes it, after the batch was moved; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_items = torch.tensor(7, device=batch["input_ids"].device)
    with CountCopies() as counted:
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss, counted.copies


def test_a_step_on_a_batch_with_a_layout_waits_for_nothing(collator):
    change_layout(collator, packs=True, round_up=True, locates_labels=True)
    loss, copies = step(make_model(round_up=True).to("meta"), send_to_device(collator(ROWS), "meta"))
    assert loss.is_meta
    assert copies == 0
    for part in ("packs", "locates_labels"):  # each spares a read
        change_layout(collator, packs=True, round_up=True, locates_labels=True)
        change_layout(collator, **{part: False})
        with pytest.raises(NotImplementedError):  # the first read of what stands on the meta device
            step(make_model(round_up=True).to("meta"), send_to_device(collator(ROWS), "meta"))


@pytest.mark.parametrize(("round_up", "training"), [(False, True), (True, False)])
def test_a_layout_changes_no_bit(collator, round_up, training):
    plain = collator(ROWS)
    change_layout(collator, packs=True, round_up=round_up, locates_labels=True)
    with_layout = collator(ROWS)
    assert set(with_layout) == {*plain, "layout"}
    assert (plain["input_ids"] == MASK).any()
    found = []
    for batch in (plain, with_layout):
        model = make_model(round_up).train(training)
        model(**batch).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layout_of_other_rows_is_not_believed(collator):
    change_layout(collator, packs=True, locates_labels=True)
    batch, cut = collator(ROWS), collator(ROWS[:2])
    model = make_model()
    assert torch.equal(model(**{**cut, "layout": batch["layout"]}).loss, model(**cut).loss)
    filled = LayoutMaker(packs=True, round_up=True).add_to(cut)  # the encoder packs without filling
    assert torch.equal(model(**filled).loss, model(**cut).loss)
