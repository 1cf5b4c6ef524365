"""The mean of gradients over processes, after the backward pass: what DistributedDataParallel does during it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

CHUNK_BYTES = 25 * 2**20  # as DistributedDataParallel's buckets


@torch.no_grad()
def average_gradients(model: nn.Module, world_size: int) -> None:
    """Replaces the gradient of every parameter that trains by the mean over processes; all must call it.

    A gradient that a process lacks counts as zero, and one that all lack stays away, so that optimizers leave its
    parameter alone. Each is divided before it is summed, as DistributedDataParallel does.
    Cost: one all-reduce per 25 MiB, and as much memory; one read from the device.
    """
    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has = torch.tensor([parameter.grad is not None for parameter in training], dtype=torch.int32)
    has = has.to(training[0].device)
    distributed.all_reduce(has)
    gradients = []
    for parameter, number in zip(training, has.tolist()):
        if number and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    for chunk in _chunks(gradients):
        flat = _flatten_dense_tensors(chunk).div_(world_size)
        distributed.all_reduce(flat)
        for gradient, mean in zip(chunk, _unflatten_dense_tensors(flat, chunk)):
            gradient.copy_(mean)


def _chunks(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors of one dtype each, in their order, up to `CHUNK_BYTES` or one tensor."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + tensor.nbytes > CHUNK_BYTES or tensor.dtype != chunk[0].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk
