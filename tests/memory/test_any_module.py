"""The ledger on models that are no encoders of transformers: a plain module in a `Sequential`, a GPT-2, a pattern."""

import pytest
import torch
from any_models import Layer, Net, gpt2
from ledger_subjects import keep_whole
from torch import nn

from hf_ext.memory.forecast import MemoryModel, TrainConfig
from hf_ext.memory.stored import optimizer_bytes


def deep_net(kind=nn.Sequential):
    torch.manual_seed(0)
    layers = [Layer(32, 64) for _ in range(8)]
    return Net(nn.Sequential(*layers) if kind is nn.Sequential else kind(*layers), width=32).train()


def numbers(rows):
    return {"x": torch.zeros(rows, 5, device="meta"), "labels": torch.zeros(rows, dtype=torch.long, device="meta")}


def tokens(rows):
    ids = torch.zeros(rows, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def peak(subject, policy="none"):
    return subject.timeline(TrainConfig(64, policy)).peak()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["none", "full", "half"])
@pytest.mark.parametrize(
    ("make", "batch"), [(deep_net, numbers), (lambda: gpt2(n_layer=8).train(), tokens)], ids=["Sequential", "GPT-2"]
)
def test_a_few_layers_give_the_peak_of_the_whole_model(make, batch, policy):
    cut, whole = MemoryModel(make(), batch, scales=False), keep_whole(MemoryModel(make(), batch))
    assert peak(cut, policy) == peak(whole, policy)
    assert any(repeat.copies > 1 for repeat in cut.timeline(TrainConfig(64, policy)).repeats)


def test_a_pattern_says_which_layers_are_recomputed_and_get_muon():
    def net(pattern):
        model = deep_net()
        model.block_pattern = pattern
        return model

    def activations(pattern):
        return peak(MemoryModel(net(pattern), numbers, scales=False), "full").activations

    assert activations(None) == activations(r"trunk\.\d+") < activations(r"trunk\.[0-3]")
    kept = [optimizer_bytes(net(pattern), "adamw_torch", True)[0] for pattern in (None, r"trunk\.[0-3]")]
    assert (
        kept[1] - kept[0] == 4 * 2 * 32 * 64 * 4
    )  # four layers of two matrices, a float32 number more for each weight
