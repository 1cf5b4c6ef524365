"""Speed-ups on models that are none of proteins: a classifier of texts, of images, a causal LM, a plain module."""

import copy
from dataclasses import replace

import pytest
import torch
from any_models import TRAINED, resnet
from tiny_encoders import tiny_bert, tiny_esm, tiny_t5
from tiny_masked_lm import largest_weight_difference, make_args, make_rows
from token_rows import pad_rows
from torch import nn
from transformers import BertModel, EsmModel

from hf_ext.models import MuonAdamW, find_blocks
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer

MODELS = pytest.mark.parametrize("name", TRAINED)
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trainer_of(name, folder, plan=None, **given):
    make, rows = TRAINED[name]
    torch.manual_seed(0)
    return FastTrainer(make(), make_args(folder, **given), train_dataset=rows(), plan=plan)


def compiled(name, folder, backend, **given):
    """With a cheap compiler in place of inductor."""
    make, rows = TRAINED[name]
    args = make_args(folder, speedups=["compile"], **given)
    plan = make_plan(args, make(), rows())
    named = replace(plan["compile"], settings={"dynamic": True, "backend": backend})
    plan.decisions = [named if decision.name == "compile" else decision for decision in plan.decisions]
    return trainer_of(name, folder, plan, speedups=["compile"], **given)


NIGHTLY = [pytest.param(name, "aot_eager", marks=pytest.mark.nightly) for name in TRAINED]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "backend"), [("ViT", "eager"), ("plain module", "eager"), *NIGHTLY])
def test_blocks_are_compiled_and_the_run_ends_in_the_weights_of_one_without(tmp_path, name, backend):
    stock = trainer_of(name, tmp_path / "stock")
    stock.train()
    trainer = compiled(name, tmp_path / "compiled", backend)
    decision = trainer.plan["compile"]
    assert decision.status == "applied"
    assert decision.evidence["blocks"] == len(find_blocks(trainer.model)) >= 3
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 1
    trainer.train()
    assert largest_weight_difference(trainer.model, stock.model) < 1e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 1
    trainer.end()
    assert all(block._compiled_call_impl is None for block in find_blocks(trainer.model))


def failing(graph, inputs):
    raise RuntimeError("no compiler here")


def test_a_compiler_that_fails_is_seen_on_the_models_own_rows(tmp_path):
    trainer = compiled("ViT", tmp_path, failing)
    assert trainer.plan["compile"].status == "skipped"
    assert "no compiler here" in trainer.plan["compile"].reason
    trainer.train()


@MODELS
def test_muon_trains_and_says_what_goes_where(tmp_path, name):
    trainer = trainer_of(name, tmp_path, speedups="muon", weight_decay=0.1, **ADAMW)
    reason = trainer.plan["muon"].reason
    blocks = {"BERT": "18 matrices of 3 BertLayer", "ViT": "18 matrices of 3 ViTLayer"}
    blocks |= {"GPT-2": "12 matrices of 3 GPT2Block", "plain module": "8 matrices of 4 Layer"}
    assert reason.startswith(f"{blocks[name]} get Muon, the rest AdamW")
    before = copy.deepcopy(trainer.model)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is MuonAdamW
    assert {group["weight_decay"] for group in optimizer.param_groups if group["algorithm"] == "muon"} == {0.1}
    assert {group["weight_decay"] for group in optimizer.param_groups if group["algorithm"] == "adamw"} == {0.0, 0.1}
    assert largest_weight_difference(trainer.model.cpu(), before.cpu()) > 0


class Around(nn.Module):
    """A number from the mean of an encoder's states; no configuration, so no model type."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 1)

    def forward(self, input_ids, attention_mask, labels=None):
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        logits = self.head((states * mask).sum(1) / mask.sum(1))[:, 0]
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def test_an_encoder_that_we_know_is_fast_in_any_module(tmp_path):
    rows = make_rows().map(lambda row: {"labels": row["length"] / 10})
    given = {"without": ["precision", "cpu_matmul", "cpu_threads", "compile"], "train_sampling_strategy": "random"}
    for family, encoder in (("esm", tiny_esm(EsmModel)), ("bert", tiny_bert(BertModel)), ("t5", tiny_t5())):
        found = {}
        for name, speedups in (("plain", []), ("fast", ["all"])):
            torch.manual_seed(0)
            model = Around(copy.deepcopy(encoder))
            args = make_args(tmp_path / family / name, speedups=speedups, learning_rate=1e-3, **given)
            trainer = FastTrainer(model, args, pad_rows, rows)
            trainer.train()
            found[name] = trainer
        plan = found["fast"].plan
        assert [plan[name].status for name in ("attention", "packing")] == ["applied"] * 2, family
        assert plan["packing"].evidence["max_difference"] < 1e-4
        assert plan["fused_gelu"].status == ("applied" if family == "esm" else "skipped")
        assert largest_weight_difference(found["plain"].model, found["fast"].model) < 1e-4, family


class Convolution(nn.Module):
    """One of torch's own: a mean over places, and classes."""

    def __init__(self):
        super().__init__()
        self.filters, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, pixel_values, labels=None):
        logits = self.head(self.filters(pixel_values).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("make", [resnet, Convolution])
def test_convolutions_stay_in_channels_last_through_saves_and_a_continued_run(tmp_path, make):
    torch.manual_seed(1)
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(16)]

    def train(folder, memory_format, **given):
        torch.manual_seed(0)
        model = make().to(memory_format=memory_format)
        args = make_args(folder, max_steps=4, save_strategy="steps", save_steps=2, speedups=["all"], **ADAMW, **given)
        FastTrainer(model, args, train_dataset=rows).train()
        return model

    plain = train(tmp_path / "plain", torch.contiguous_format)
    train(tmp_path / "last", torch.channels_last)
    found = train(tmp_path / "last", torch.channels_last, resume_from_checkpoint=str(tmp_path / "last/checkpoint-2"))
    assert largest_weight_difference(found, plain) < 1e-5
    for model, is_last in ((found, True), (plain, False)):
        filters = [one for one in model.parameters() if one.dim() == 4 and one.shape[-1] > 1]
        assert filters
        assert {one.is_contiguous(memory_format=torch.channels_last) for one in filters} == {is_last}
