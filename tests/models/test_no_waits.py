"""A training step that asks its device for nothing: on torch's meta device, where every read is an error."""

from collections import Counter

import datasets
import pytest
import torch
from accelerate.utils import send_to_device
from miniature_esm import MASK
from tiny_encoders import packed, tiny_esm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EsmTokenizer, TrainerCallback

from hf_ext.data.masking import MaskedLMCollator
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.data.varlen_layout import LayoutMaker, change_layout
from hf_ext.speedups.fused_layers import label_only
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

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


@pytest.mark.parametrize("round_up", [False, True])
def test_a_step_on_a_batch_with_a_layout_waits_for_nothing(collator, round_up):
    change_layout(collator, packs=True, round_up=round_up, locates_labels=True)
    model = make_model(round_up).to("meta")
    loss, copies = step(model, send_to_device(collator(ROWS), "meta"))
    assert loss.is_meta
    assert copies == 0


@pytest.mark.parametrize("part", ["packs", "locates_labels"])
def test_each_part_of_the_layout_spares_a_read(collator, part):
    change_layout(collator, packs=True, locates_labels=True)
    change_layout(collator, **{part: False})
    with pytest.raises(NotImplementedError):  # the first read of what stands on the meta device
        step(make_model().to("meta"), send_to_device(collator(ROWS), "meta"))


@pytest.mark.parametrize("round_up", [False, True])
@pytest.mark.parametrize("training", [False, True])
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


def test_models_that_were_not_changed_take_such_batches(collator):
    plain = collator(ROWS)
    change_layout(collator, packs=True, locates_labels=True)
    model = tiny_esm().eval()
    assert torch.equal(model(**collator(ROWS)).logits, model(**plain).logits)
    model.set_attn_implementation("hf_ext_padded")  # not packed: a layout is no reason to take rows for one
    assert torch.equal(model(**collator(ROWS)).logits, model(**plain).logits)


def test_a_collator_makes_a_layout_only_while_a_speed_up_reads_it(collator):
    assert collator.layout is None
    change_layout(collator, packs=True)
    change_layout(collator, locates_labels=True)
    change_layout(collator, packs=False)
    assert collator(ROWS)["layout"].segments is None
    change_layout(collator, locates_labels=False)
    assert collator.layout is None
    change_layout(lambda rows: rows, packs=True)  # of other collators it is read from the mask


class CountReads(TorchDispatchMode):
    """Counts what would wait, were the tensors on a device."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "equal"):
            self.reads.append(name)
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self.reads.append("boolean index")
        return function(*args, **(kwargs or {}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("workers", "with_layout"), [(0, True), (1, True), (0, False)])
def test_forward_and_backward_of_a_trainer_read_nothing(collator, tmp_path, workers, with_layout):
    speedups = {"speedups": ["attention", "packing", "masked_lm_head"], "attention": "padded"}
    settings = {"max_steps": 3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, **speedups}
    sizes = {"per_device_train_batch_size": 4, "dataloader_num_workers": workers}
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, **settings, **sizes)
    trainer = FastTrainer(tiny_esm(), args, collator, datasets.Dataset.from_list(ROWS * 8))
    assert all(trainer.plan.applied(name) for name in speedups["speedups"])
    reads = []

    class Watched(type(trainer)):
        def training_step(self, *args, **kwargs):
            with CountReads() as counted:
                loss = super().training_step(*args, **kwargs)
            reads.append(counted.reads)
            return loss

    trainer.__class__ = Watched
    collator.layout = collator.layout if with_layout else None
    trainer.train()
    # Where sequences and where labels stand; in the first step, the tokens are looked at.
    assert reads[1:] == [[] if with_layout else ["nonzero", "nonzero"]] * 2
    trainer.end()
    assert collator.layout is None


class ReadsOfSteps(TrainerCallback):
    """Counts what would wait between the ends of two steps: data, callbacks and optimizer included."""

    def __init__(self, first, last):
        self.first, self.last, self.reads, self.counted = first, last, None, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first:
            self.counted = CountReads()
            self.counted.__enter__()
        if state.global_step == self.last:
            self.counted.__exit__(None, None, None)
            self.reads = self.counted.reads


def count_reads_of_steps(tmp_path, collator, **settings):
    """Of steps 6 to 12 with a worker, which makes the layouts; rates are read at step 4, 13 and where Trainer logs."""
    speedups = {"speedups": ["attention", "packing", "masked_lm_head"], "attention": "padded"}
    settings = {"max_steps": 14, "logging_steps": 100, "save_strategy": "no", "report_to": "none", **settings}
    sizes = {"per_device_train_batch_size": 4, "dataloader_num_workers": 1, "disable_tqdm": True}
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, **settings, **sizes, **speedups)
    counting = ReadsOfSteps(5, 12)
    trainer = FastTrainer(tiny_esm(), args, collator, datasets.Dataset.from_list(ROWS * 40), callbacks=[counting])
    trainer.train()
    trainer.end()
    return counting.reads


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}])
def test_whole_steps_wait_for_nothing(collator, tmp_path, settings):
    assert count_reads_of_steps(tmp_path, collator, **settings) == []


def test_a_step_that_is_logged_waits_and_would_be_seen(collator, tmp_path):
    assert "_local_scalar_dense" in count_reads_of_steps(tmp_path, collator, logging_steps=7)


class CountCasts(TorchDispatchMode):
    """Counts casts of weights, by their place in memory; the same weight has one."""

    def __init__(self, model):
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.casts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_to_copy" and args[0].data_ptr() in self.names:
            self.casts[self.names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_in_forward_and_backward(collator):
    """However many layers or labels use it: autocast keeps what it rounded."""
    change_layout(collator, packs=True, locates_labels=True)
    model = make_model()
    with CountCasts(model) as counted:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**collator(ROWS)).loss
        loss.backward()
    assert len(counted.casts) > 15
    assert set(counted.casts.values()) == {1}
    with CountCasts(model) as uncached, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        model(**collator(ROWS)).loss.backward()
    assert sum(uncached.casts.values()) >= sum(counted.casts.values())
