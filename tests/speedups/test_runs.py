"""Speed-ups in runs: the weights of a run without, what each did, less kept or computed, and that it is undone."""

import copy
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from inside import label_only
from miniature_esm import NO_DROPOUT, make_esm, make_wide_esm
from tiny_masked_lm import IGNORED, largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import RecordingCollator, pad_rows
from transformers import EsmForTokenClassification, Trainer, TrainerCallback
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.errors import ArgumentError, DataError, PlanRefused
from hf_ext.models import MuonAdamW, block_matrices
from hf_ext.speedups.fused_layers import fuse_qkv
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
PACKED = {"speedups": ["attention", "packing"]}
SAME = {  # what switches it on, and the entry of the plan that has to be applied
    "attention": {"speedups": ["attention"]},
    "packing": PACKED,
    "masked_lm_head": {"speedups": ["masked_lm_head"]},
    "fused_gelu": {"speedups": ["fused_gelu"]},
    "fused_qkv": {"speedups": ["fused_qkv"]},
}


def own_parts(model) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", SAME)
def test_a_run_ends_in_the_weights_of_one_without_and_the_model_is_as_it_was(tmp_path, name):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    stock, other = make_trainer(tmp_path / "stock", **split), make_trainer(tmp_path / "o", learning_rate=0.09, **split)
    ours = make_trainer(tmp_path / "ours", **split, **SAME[name])
    assert ours.plan.applied(name)
    for trainer in (stock, ours, other):
        trainer.train()
    assert largest_weight_difference(ours.model, stock.model) < 1e-6
    assert largest_weight_difference(other.model, stock.model) > 1e-3  # what the comparison would see
    ours.end()
    assert not any("forward" in own for own in own_parts(ours.model).values())
    assert ours.model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
def test_on_a_card_fp16_begins_at_the_loss_of_float32_and_a_step_that_overflows_is_left_out(tmp_path):
    plain = make_trainer(tmp_path / "plain", use_cpu=False)
    ours = make_trainer(tmp_path / "ours", use_cpu=False, fp16=True, max_steps=8)
    weight, seen = next(ours.model.parameters()), []

    class Watch(TrainerCallback):
        def on_step_end(self, *event, **kwargs):
            seen.append((weight.detach().clone(), ours.accelerator.scaler.get_scale()))

    ours.add_callback(Watch())
    weight.register_hook(lambda gradient: gradient * (math.inf if len(seen) == 5 else 1.0))
    for trainer in (plain, ours):
        trainer.train()
    first, other = (trainer.state.log_history[0]["loss"] for trainer in (plain, ours))
    assert abs(first - other) < 3e-2
    # Earlier steps may overflow too, until a scale is found that gradients bear.
    (before, scale), (same, halved), (after, kept) = seen[4:7]
    assert scale > halved == scale / 2 == kept
    assert torch.equal(same, before)
    assert not torch.equal(after, same)
    assert not torch.equal(before, seen[0][0])


def test_off_means_untouched(tmp_path):
    model = make_wide_esm()
    before = own_parts(model)
    make_trainer(tmp_path, model)
    assert own_parts(model) == before


def count_operations(model) -> tuple[int, int]:
    with torch.profiler.profile() as profile, torch.no_grad():
        model.cpu().eval()(**pad_rows(make_rows(4)))
    calls = {event.key: event.count for event in profile.key_averages()}
    return calls.get("aten::erf", 0), calls.get("aten::gelu", 0)


def test_fewer_operations_run_and_those_of_before_come_back(tmp_path):
    model = make_wide_esm()
    stock = count_operations(model)
    trainer = make_trainer(tmp_path, model, speedups=["fused_gelu"])
    assert count_operations(model) == (stock[0] - 2, stock[1] + 2)  # a layer each; the head's own stays
    trainer.end()
    assert count_operations(model) == stock


def count_products(model) -> int:
    with torch.profiler.profile() as profile, torch.no_grad():
        model.cpu().eval()(**pad_rows(make_rows(4)))
    return {event.key: event.count for event in profile.key_averages()}["aten::addmm"]


def test_one_product_in_place_of_three_but_where_somebody_looks_at_one(tmp_path):
    model = make_wide_esm()
    stock, num_layers = count_products(model), model.config.num_hidden_layers
    trainer = make_trainer(tmp_path, model, speedups=["fused_qkv"])
    assert count_products(model) == stock - 2 * num_layers
    seen = []
    hook = model.esm.encoder.layer[0].attention.self.key.register_forward_hook(lambda *given: seen.append(given[2]))
    assert count_products(model) == stock - 2 * (num_layers - 1)
    assert len(seen) == 1
    hook.remove()
    trainer.end()
    assert count_products(model) == stock


def test_layers_without_a_bias_and_weights_that_autocast_leaves_alone_compute_as_before():
    model = make_wide_esm()
    model.esm.encoder.layer[0].attention.self.query.bias = None
    batch = pad_rows(make_rows(4))
    for changed, is_autocast in ((model, False), (copy.deepcopy(model).double(), True)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, is_autocast):
            stock = changed.eval()(**batch).logits
            assert fuse_qkv(changed) == changed.config.num_hidden_layers
            assert (changed(**batch).logits - stock).abs().max() < 1e-5


FAULTS = """
import ctypes, resource, sys
from tiny_masked_lm import make_trainer
if sys.argv[1:]:
    assert make_trainer(sys.argv[1], speedups=["cpu_memory"]).plan.applied("cpu_memory")
libc, size = ctypes.CDLL(None), 20_000_000
libc.malloc.restype, libc.memset.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)
for turn in range(12):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(10)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_freed_memory_is_not_asked_for_again(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    faults = []
    for given in ([], [str(tmp_path)]):
        command = [sys.executable, "-c", FAULTS, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        faults.append(int(done.stdout.split()[-1]))  # DeepSpeed writes there too
    assert faults[1] < faults[0] / 10


BATCH = pad_rows(make_rows(4))
NUM_LABELS = int(BATCH["labels"].ne(IGNORED).sum())
HEAD = {"speedups": ["masked_lm_head"]}


@pytest.fixture
def pair():
    """A model whose head computes where labels are, and one of transformers."""
    stock = make_wide_esm()
    model = copy.deepcopy(stock)
    assert label_only(model) == 1
    return model, stock


def test_a_batch_without_labels_costs_nothing_instead_of_being_no_number(pair):
    batch = {**BATCH, "labels": torch.full_like(BATCH["labels"], IGNORED)}
    loss = pair[0].train()(**batch).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad.abs().max() == 0 for p in pair[0].parameters() if p.grad is not None)
    assert torch.isnan(pair[1](**batch).loss)


def test_the_head_computes_one_row_per_labelled_token(pair):
    seen = []
    for model in pair:
        model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
        model.train()(**BATCH)
    assert seen == [NUM_LABELS, BATCH["labels"].numel()]
    assert seen[1] > 2 * seen[0]


def test_stock_trainer_weighs_labels_by_how_a_step_is_split_and_this_does_not(tmp_path):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours = make_trainer(tmp_path / "ours", **HEAD, **split)
    stock = Trainer(make_wide_esm(), make_args(tmp_path / "stock", **split), pad_rows, make_rows())
    whole = make_trainer(tmp_path / "whole", per_device_train_batch_size=8)
    for trainer in (ours, stock, whole):
        trainer.train()
    assert largest_weight_difference(ours.model, whole.model) < 1e-5
    assert largest_weight_difference(stock.model, whole.model) > 1e-4


MUON = {"optim": "adamw_torch_fused", "speedups": "muon", "learning_rate": 1e-3, "weight_decay": 0.1}


def rates(optimizer) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {"muon": set(), "adamw": set()}
    for group in optimizer.param_groups:
        found[group["algorithm"]].add(group["lr"])
    return found


def test_the_optimizer_holds_every_parameter_once_with_trainers_weight_decay(tmp_path):
    model = make_wide_esm()
    plain = make_trainer(tmp_path / "a", model, **{**MUON, "speedups": []}).create_optimizer()
    assert type(plain) is torch.optim.AdamW  # off means untouched
    ours = make_trainer(tmp_path / "m", model, **MUON).create_optimizer()
    assert type(ours) is MuonAdamW

    def decay(optimizer):
        pairs = [(id(p), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
        return sorted(pairs)

    assert decay(ours) == decay(plain)
    matrices = [p for group in ours.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    assert {id(p) for p in matrices} == {id(p) for p in block_matrices(model)}
    assert all(group["fused"] for group in ours.param_groups if group["algorithm"] == "adamw")


def test_the_schedule_scales_both_and_a_matrix_keeps_one_number_a_weight(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert rates(optimizer) == {"muon": {0.0}, "adamw": {0.0}}  # linear, at its end
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-3}
    matrices = sum(p.numel() for p in block_matrices(trainer.model))
    assert matrices == 2 * (4 * 32 * 32 + 2 * 32 * 64)
    kept = [tensor.numel() for state in optimizer.state.values() for tensor in state.values() if tensor.numel() > 1]
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p in optimizer.state)
    assert sum(kept) == 2 * trained - matrices
    trainer.train()  # a second time, with the optimizer it has
    assert trainer.optimizer.optimizer is optimizer


def test_an_optimizer_of_the_callers_own_is_not_replaced_in_silence(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"--speedups muon: the trainer was given an optimizer \(SGD\)"):
        trainer.train()


def count_tokens(trainer) -> list[int]:
    """Tokens that the first feed-forward layer computes on while the trainer trains."""
    seen = []
    layer = next(module for module in trainer.model.modules() if isinstance(module, EsmIntermediate))
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    trainer.train()
    return seen


def test_packed_training_computes_on_no_padding(tmp_path):
    stock, packed = make_trainer(tmp_path / "stock"), make_trainer(tmp_path / "packed", **PACKED)
    evidence = packed.plan["packing"].evidence
    assert evidence["max_difference"] < 1e-4
    torch.manual_seed(stock.args.seed)
    batches = list(stock.get_train_dataloader())[:4]  # those that training sees: both draw their order from the seed
    torch.manual_seed(stock.args.seed)
    real = [int(batch["attention_mask"].sum()) for batch in batches]
    padded = [batch["input_ids"].numel() for batch in batches]
    assert count_tokens(stock) == padded
    assert count_tokens(packed) == real
    assert sum(real) < 0.9 * sum(padded)


def test_a_token_budget_counts_the_tokens_of_packed_rows(tmp_path):
    given = {"max_tokens_per_batch": 100, "per_device_train_batch_size": 8}
    packed = make_trainer(tmp_path / "packed", **PACKED, **given)
    padded = make_trainer(tmp_path / "padded", **given)
    packed.train()
    sizes = [batch["attention_mask"].sum().item() for batch in packed.get_train_dataloader()]
    assert max(sizes) <= 100
    assert sum(sizes) == sum(make_rows()["length"])
    assert packed.plan["token_budget"].evidence["tokens_per_batch"] > 80
    assert max(batch["input_ids"].numel() for batch in packed.get_train_dataloader()) > 100
    assert max(batch["input_ids"].numel() for batch in padded.get_train_dataloader()) <= 100


def test_packed_encoders_that_differ_are_not_used(tmp_path, monkeypatch):
    # Packing that forgets where each sequence begins, as transformers' own packed inputs do for ESM.
    monkeypatch.setattr("hf_ext.models.kernels.packing._for_layers", lambda kwargs, segments: {})
    monkeypatch.setattr("hf_ext.models.kernels.packing.keeps_sequences_apart", lambda encoder: True)
    model = make_wide_esm()
    args = make_args(tmp_path, speedups=["all"], without=["cpu_matmul", "precision", "fused_gelu", "masked_lm_head"])
    decision = FastTrainer(model, args, pad_rows, make_rows()).plan["packing"]
    assert decision.status == "skipped"
    assert decision.reason.startswith("against padded encoders: states differ by ")
    assert "forward" not in vars(model.esm)
    with pytest.raises(PlanRefused, match=r"packing: against padded encoders: states differ .* Leave packing out"):
        make_trainer(tmp_path, make_wide_esm(), **PACKED)


QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 3}


def make_token_rows(num: int = 40) -> Dataset:
    """Rows of 3 to 30 tokens with a label per token."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 31, (num,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (size,), generator=generator).tolist() for size in sizes]
    labels = [torch.randint(0, 3, (size,), generator=generator).tolist() for size in sizes]
    return Dataset.from_dict({"row": list(range(num)), "input_ids": ids, "labels": labels, "length": sizes})


@pytest.fixture
def token_trainer(tmp_path):
    def make(folder="run", rows=None, **given):
        tokens = {"vocab_size": 24, "mask_token_id": 23, "num_labels": 3}
        model = make_esm(EsmForTokenClassification, **tokens, **NO_DROPOUT)
        settings = {"max_tokens_per_batch": 100, "num_train_epochs": 3, "learning_rate": 1e-2, **given}
        args = FastTrainingArguments(
            output_dir=str(tmp_path / folder), remove_unused_columns=False, **{**QUIET, **settings}
        )
        return FastTrainer(model, args, RecordingCollator(), make_token_rows() if rows is None else rows)

    return make


def test_training_sees_every_row_once_an_epoch_within_the_budget_and_says_how_full_it_was(token_trainer):
    trainer = token_trainer()
    trainer.train()
    evidence = json.loads((Path(trainer.args.output_dir) / "plan.json").read_text())["decisions"]
    (evidence,) = [d["evidence"] for d in evidence if d["name"] == "token_budget"]
    per_epoch = evidence["batches_per_epoch"]
    assert trainer.state.max_steps == 3 * per_epoch == len(trainer.data_collator.batches)
    lengths = trainer.train_dataset["length"][:]
    for epoch in range(3):
        batches = trainer.data_collator.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for batch in batches for row in batch) == list(range(40))
        assert max(len(batch) * max(lengths[row] for row in batch) for batch in batches) <= 100
    assert evidence["tokens_per_batch"] == sum(lengths) // per_epoch


def test_a_row_above_the_budget_stops_the_run_before_its_first_step(token_trainer):
    with pytest.raises(DataError, match=r"Row \d+ has \d+ tokens.*max_tokens_per_batch is 20"):
        token_trainer(max_tokens_per_batch=20).train()
    with pytest.raises(PlanRefused, match="token_budget"):
        token_trainer(rows=make_token_rows().remove_columns("length"), train_sampling_strategy="group_by_length")


@pytest.mark.parametrize("speedups", [[], ["embedding_cache"]], ids=["live", "cached"])
def test_towers_train_on_budgets_of_the_residues_that_are_encoded(make_affinity, demo_rows, tmp_path, speedups):
    model, collator = make_affinity("frozen", "lora")
    args = FastTrainingArguments(
        output_dir=str(tmp_path), max_tokens_per_batch=1000, speedups=speedups, max_steps=2, logging_steps=1, **QUIET,
        embedding_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = FastTrainer(model, args, collator, demo_rows)
    batches = list(trainer.get_train_dataloader())
    padded = [sum(tokens["input_ids"].numel() for tokens in batch["sequences"].values()) for batch in batches]
    assert max(padded) <= 1000
    assert sum(len(batch["labels"]) for batch in batches) == 200
    assert sorted(batches[0]["sequences"]) == (["antigen"] if speedups else ["antigen", "heavy", "light"])
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 2
