"""Muon for matrices and AdamW for the rest: torch's two optimizers in one that keeps, copies and loads its state."""

import math

import pytest
import torch
from closeness import largest
from miniature_esm import esm_config
from torch import nn
from transformers import BertConfig, BertModel, EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.models.muon import MuonAdamW, block_matrices

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ESM = esm_config(vocab_size=24, mask_token_id=23)


def names_of(model: nn.Module) -> set[str]:
    chosen = {id(matrix) for matrix in block_matrices(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_matrices_of_an_esm_layer_are_these_six_and_nothing_of_embeddings_heads_or_norms():
    attention = [f"attention.{name}.weight" for name in ("self.query", "self.key", "self.value", "output.dense")]
    layer = {f"esm.encoder.layer.0.{name}" for name in (*attention, "intermediate.dense.weight", "output.dense.weight")}
    assert names_of(EsmForMaskedLM(ESM)) == names_of(EsmForSequenceClassification(ESM)) == layer


def test_a_pooler_is_no_layer_and_frozen_matrices_and_adapters_do_not_count():
    model = BertModel(BertConfig(**SHAPE, vocab_size=24))
    assert len(names_of(model)) == 6
    assert not any("pooler" in name for name in names_of(model))
    model.encoder.layer[0].attention.requires_grad_(False)
    assert names_of(model) == {"encoder.layer.0.intermediate.dense.weight", "encoder.layer.0.output.dense.weight"}
    assert names_of(wrap_with_lora(EsmForSequenceClassification(ESM), LoraSettings(r=2))) == set()


def test_towers_give_the_matrices_of_those_that_train(make_affinity):
    model, _ = make_affinity("full", "frozen")
    assert len(names_of(model)) == 12  # two layers
    assert all(name.startswith("encoders.0.") for name in names_of(model))
    assert names_of(make_affinity("frozen", "frozen")[0]) == set()
    assert block_matrices(None) == block_matrices(nn.ModuleList([nn.Linear(2, 2)])) == []


# --- steps -----------------------------------------------------------------------------------------------------------


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def make_both(net: nn.Sequential) -> MuonAdamW:
    return MuonAdamW(make_adamw(net.parameters()), [net[0].weight])


def take_steps(net: nn.Module, optimizers: list, first: int = 0, last: int = 5) -> None:
    for step in range(first, last):
        net.zero_grad()
        net(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def distance(net: nn.Module, other: nn.Module) -> float:
    return largest((a - b).abs().max() for a, b in zip(net.parameters(), other.parameters()))


def test_steps_are_those_of_the_two_optimizers_of_torch_side_by_side():
    together, apart, adamw = make_net(), make_net(), make_net()
    take_steps(together, [make_both(together)])
    muon = torch.optim.Muon([apart[0].weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    take_steps(apart, [muon, make_adamw([apart[0].bias, *apart[2].parameters()])])
    assert distance(together, apart) == 0.0
    take_steps(adamw, [make_adamw(adamw.parameters())])
    assert distance(together, adamw) > 1e-3


def test_an_update_is_orthogonal_with_the_root_mean_square_of_adamw():
    net = nn.Linear(16, 8, bias=False)
    optimizer = MuonAdamW(torch.optim.AdamW(net.parameters(), lr=1.0, weight_decay=0.0), net.parameters())
    before = net.weight.detach().clone()
    net.weight.grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    update = before - net.weight.detach()
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)
    values = torch.linalg.svdvals(update) / (0.2 * math.sqrt(16))
    assert values.min() > 0.6  # the iteration leaves singular values between about 0.7 and 1.2
    assert values.max() < 1.3
    assert torch.linalg.svdvals(net.weight.grad).min() < 0.5 * torch.linalg.svdvals(net.weight.grad).max()


def test_state_loads_bit_for_bit(tmp_path):
    whole, resumed, lost = make_net(), make_net(), make_net()
    optimizer = make_both(whole)
    take_steps(whole, [optimizer], 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for net in (resumed, lost):
        net.load_state_dict(whole.state_dict())
    take_steps(whole, [optimizer], 3, 6)
    loaded = make_both(resumed)
    loaded.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(resumed, [loaded], 3, 6)
    assert distance(whole, resumed) == 0.0
    take_steps(lost, [make_both(lost)], 3, 6)
    assert distance(whole, lost) > 1e-4


@pytest.mark.parametrize(("chosen", "says"), [("none", "0 of 0"), ("foreign", "1 of 1"), ("bias", "2D")])
def test_what_is_no_matrix_of_the_optimizer_is_refused(chosen, says):
    net = make_net()
    matrices = {"none": [], "foreign": [nn.Parameter(torch.zeros(2, 2))], "bias": [net[0].bias]}[chosen]
    with pytest.raises(ValueError, match=says):
        MuonAdamW(make_adamw(net.parameters()), matrices)
