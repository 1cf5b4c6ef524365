"""Which parameters of any model are Muon's matrices, and what is left to AdamW: counted by hand."""

import pytest
from any_models import Net, bert, gpt2, llama, mixtral, resnet, t5, vit
from torch import nn

from hf_ext.models.muon import block_matrices


def names(model, pattern=None) -> set[str]:
    model.block_pattern = pattern
    chosen = {id(matrix) for matrix in block_matrices(model)}
    return {name for name, weight in model.named_parameters() if id(weight) in chosen}


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

    assert names(Tied()) == {"layers.0.1.weight", "layers.1.0.weight", "layers.1.1.weight"}
