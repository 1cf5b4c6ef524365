"""Tensors that are spread over processes (FSDP2): each writes its own part, as safetensors; nothing is gathered.

torch's own `HuggingFaceStorageWriter` and `HuggingFaceStorageReader` do it, for tensors alone: whatever else is in a
state dict they pickle into the same file, and destroy it (torch 2.13, `filesystem.py`, `_write_files_from_queue`). They
also take a tensor of which the last part is missing for a shorter one. So only tensors are handed to them, and shapes,
dtypes and parts are checked before one is read. Numbers go into JSON, see `sharded_state.py`.

Reading needs no other process: any number of them, one too, read what any number wrote.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from .tensor_files import describe_names

# The writer builds a file in host memory before it writes it: this bounds what that takes.
FILE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Spread:
    """A tensor as it is on disk: shape and dtype of the whole."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def is_spread(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor, or may."""
    return isinstance(tensor, DTensor)


def own_slice(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What of a whole tensor this process holds of `like`: all of it where that is not spread. A view."""
    if not isinstance(like, DTensor):
        return whole
    (chunk,) = like.__create_chunk_list__()
    return whole[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))]


def as_spread(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor of the shape of `like`, spread as that is. Copies this process's part; no communication."""
    if not isinstance(like, DTensor):
        return whole
    local = own_slice(whole, like).to(like.to_local().device, copy=True)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, shape=like.shape, stride=like.stride())


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes this process's parts of `tensors` into `folder`, replicas once. All processes call it, with equal names.

    Not fsynced: whoever commits the folder does that. The parts of one file (2 GiB at most) are copied to host memory.

    Raises:
        OSError, SafetensorError: the disk refused a process; on all of them.
        CheckpointError: something else went wrong in a process; on all of them.
    """
    folder.mkdir(exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), _files_of(tensors), save_distributed=True)
    writer.sync_files = False
    try:
        dcp.save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)
    except CheckpointException as error:  # which is no Exception
        raise _first_failure(error, folder) from error


def _files_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> number of the file, from 1."""
    num_processes = distributed.get_world_size() if distributed.is_initialized() else 1
    files, filled = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + filled // (FILE_BYTES * num_processes)
        filled += tensor.nbytes
    return files


def _first_failure(error: CheckpointException, folder: Path) -> Exception:
    failures = {rank: found[0] for rank, found in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, OSError | SafetensorError):
            return failure
    rank, failure = next(iter(failures.items()))
    return CheckpointError(f"{folder}: process {rank}: {type(failure).__name__}: {failure}")


def read_shapes(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Spread]:
    """What `folder` holds of tensors of these shapes. Cost: reads the headers of its files.

    Raises:
        CheckpointError: a damaged file, or a tensor of which a part is missing or there twice.
    """
    found: dict[str, Any] = {}
    try:
        if folder.is_dir():
            found.update(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except (SafetensorError, LookupError, ValueError) as error:
        raise CheckpointError(f"{folder}: holds a file that is damaged ({type(error).__name__}: {error}).") from error
    # Without the last part, a tensor looks smaller than it is: what the parts say of the whole is not enough.
    torn = [name for name, shape in shapes.items() if name not in found or not _is_whole(found[name], shape)]
    if torn:
        raise CheckpointError(f"{folder}: parts are missing, or there twice, of {describe_names(torn)}.")
    return {name: Spread(torch.Size(shape), found[name].properties.dtype) for name, shape in shapes.items()}


def _is_whole(found: Any, shape: Sequence[int]) -> bool:
    return tuple(found.size) == tuple(shape) and sum(math.prod(c.sizes) for c in found.chunks) == math.prod(shape)


def load_shards(targets: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fills `targets`, whole or spread over any processes, in place. No communication: processes need not agree.

    Args:
        targets: of the shapes and dtypes that `read_shapes` gives; not all that is there need be asked for.

    Raises:
        CheckpointError: as `read_shapes`, or another dtype; nothing was read then.
    """
    there = read_shapes(folder, {name: tensor.shape for name, tensor in targets.items()})
    wrong = [name for name, tensor in targets.items() if there[name].dtype != tensor.dtype]
    if wrong:
        raise CheckpointError(f"{folder}: of another dtype: {describe_names(wrong)}.")
    if not targets:
        return
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each time; it is meant so
            found = {name: tensor.detach() for name, tensor in targets.items()}
            dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise _first_failure(error, folder) from error
