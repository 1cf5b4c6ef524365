"""Small language models, and their state dicts compared bit by bit."""

import torch
from miniature_esm import make_esm
from transformers import EsmForMaskedLM


def esm(cls=EsmForMaskedLM, seed=0, **settings):
    """ESM-2 in miniature from its configuration: 2 layers, 16 wide."""
    return make_esm(cls, seed, **{"num_hidden_layers": 2, **settings})


def bits(model):
    """Every entry of the state dict as dtype, shape and bytes."""
    return {
        name: (tensor.dtype, tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in model.state_dict().items()
    }


def different(one, other):
    one, other = bits(one), bits(other)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
