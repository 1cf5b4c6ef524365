"""State dicts compared bit by bit."""

import torch


def bits(model):
    """Every entry of the state dict as dtype, shape and bytes."""
    return {
        name: (tensor.dtype, tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in model.state_dict().items()
    }


def different(one, other):
    one, other = bits(one), bits(other)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
