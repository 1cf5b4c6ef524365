"""Muon for matrices of layers, AdamW for the rest: which they are in any model, and torch's two optimizers in one."""

import pytest
import torch
from any_models import Net, bert, gpt2, llama, mixtral, resnet, t5, vit
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


def test_what_is_no_matrix_of_the_optimizer_is_refused():
    net = make_net()
    for matrices, says in (([], "0 of 0"), ([nn.Parameter(torch.zeros(2, 2))], "1 of 1"), ([net[0].bias], "2D")):
        with pytest.raises(ValueError, match=says):
            MuonAdamW(make_adamw(net.parameters()), matrices)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "matrices"),
    [
        # Per layer: query, key, value, output, two of the feed-forward.
        (bert, 18),
        # The patch projection has four dimensions, the class token and positions three.
        (vit, 18),
        # Conv1D: query, key and value in one; the head is tied to the embeddings.
        (gpt2, 12),
        (llama, 21),
        # 4 attention matrices in each; the router's weight has no in_features; experts are stacks.
        (mixtral, 12),
        # 6 in a layer of the encoder, 10 of the decoder; the tables of positions are embeddings.
        (t5, 42),
        (Net, 8),
        # in_proj is one matrix of 24 x 8.
        (encoder, 8),
        (resnet, 0),  # convolutions only
    ],
)
def test_matrices_of_layers_get_muon(make, matrices):
    assert len(block_matrices(make())) == matrices


def test_what_is_tied_to_an_embedding_stays_with_adamw():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 8)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
            self.layers[0][0].weight = self.table.weight

    assert names_of(Tied()) == {"layers.0.1.weight", "layers.1.0.weight", "layers.1.1.weight"}
