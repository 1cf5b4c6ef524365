"""State that is not weights, exact to the bit, as JSON and safetensors: trees of plain values, tensors and arrays."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import CheckpointError

FORMAT = 1
MAX_DEPTH = 100
BLOCK_BYTES = 4096  # files take whole blocks
SUFFIXES = (".json", ".safetensors")

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn}
_FLOATS |= {torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
_INTEGERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64}
_INTEGERS |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
TENSOR_DTYPES = _FLOATS | _INTEGERS  # what safetensors 0.8 writes and reads in whole bytes
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TENSOR_DTYPES}
SCALAR_DTYPES = {"bool", "float16", "float32", "float64", "complex64", "complex128"}
SCALAR_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

# In JSON, what it has no word for is an object with one key that begins with $; an object without is a dict.
_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}  # MultiStepLR counts


def save_tree(folder: str | os.PathLike[str], name: str, tree: Any) -> None:
    """Writes `<name>.json` and, only if the tree holds tensors or arrays, `<name>.safetensors`.

    Comes back from `load_tree` with the same values, bit for bit, and the same types: dict, OrderedDict, Counter (keys:
    str, int, float, bool, None, tuple), list, tuple, str, int of any size, float, bool, None, `torch.Size`,
    `torch.dtype`, strided tensors without gradient of every dtype in `TENSOR_DTYPES`, NumPy arrays and scalars. What
    shared memory comes back as copies of its own, contiguous.

    Args:
        folder: exists. Not fsynced and not atomic: whoever commits the folder does both.
        name: plain file name without suffix.

    Raises:
        CheckpointError: a value is of another type; the message names its place in the tree.
        OSError, SafetensorError: the disk refuses.

    Cost: one pass over the bytes. Tensors of a device are all copied to host memory before the first byte is written.
    """
    text, tensors = _pack_all(tree, name)
    if any(tensor.is_meta for tensor in tensors):
        raise CheckpointError(f"{name} holds tensors on the meta device, which have no values.")
    values = Path(folder) / f"{name}.safetensors"
    if tensors:
        save_file(_separate(tensors), values)
    else:
        values.unlink(missing_ok=True)
    (Path(folder) / f"{name}.json").write_text(text, encoding="ascii")


def load_tree(folder: str | os.PathLike[str], name: str, device: str | torch.device = "cpu") -> Any:
    """What `save_tree` was given; tensors on `device`, arrays on the host.

    Nothing stays connected to the files, so deleting them frees their blocks. Runs no code: types come from a fixed
    list.

    Raises:
        CheckpointError: a file is missing, cannot be read, or the two do not belong together.
    """
    path, values = (Path(folder) / f"{name}{suffix}" for suffix in SUFFIXES)
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version of hf_ext reads {FORMAT}")
        num_tensors, tree = int(content["num_tensors"]), content["tree"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(_not_a_tree(path, error)) from error
    tensors = _read_tensors(values, num_tensors, torch.device(device))
    try:
        return _unpack(tree, tensors)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(_not_a_tree(path, error)) from error


def _not_a_tree(path: Path, error: Exception) -> str:
    return f"{path} is no tree that hf_ext wrote: {type(error).__name__}: {error}"


def tree_bytes(tree: Any) -> int:
    """Upper bound of the bytes that `save_tree` takes on disk for this tree, and for later ones of the same shapes.

    Whole blocks of 4 KiB; twice the present length of the JSON, because the numbers in it grow. Cost: no tensor is
    copied.

    Raises:
        CheckpointError: as `save_tree`.
    """
    text, tensors = _pack_all(tree, "tree")
    header = sum(160 + 21 * tensor.dim() for tensor in tensors)
    values = sum(tensor.nbytes for tensor in tensors)
    return _in_blocks(2 * len(text)) + (_in_blocks(header + values) if tensors else 0)


def _in_blocks(num_bytes: int) -> int:
    return (math.ceil(num_bytes / BLOCK_BYTES) + 1) * BLOCK_BYTES


def _pack_all(tree: Any, name: str) -> tuple[str, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    packed = _pack(tree, name, tensors, 0)
    content = {"format": FORMAT, "num_tensors": len(tensors), "tree": packed}
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n", tensors


def _pack(value: Any, path: str, tensors: list[torch.Tensor], depth: int) -> Any:
    """`value` as JSON; its tensors are appended to `tensors`. A subclass of an allowed type is another type."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path[:200]}... is more than {MAX_DEPTH} levels deep. Does it contain itself?")
    if kind in (str, bool, type(None)):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list or kind in _SEQUENCES:
        items = [_pack(item, f"{path}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {_SEQUENCES[kind]: items}
    if kind in _MAPPINGS:
        return _pack_mapping(value, path, tensors, depth)
    if kind is torch.Tensor:
        tensors.append(_checked(value, path))
        return {"$tensor": len(tensors) - 1}
    if kind is np.ndarray:
        tensors.append(_from_numpy(value, path))
        return {"$array": len(tensors) - 1}
    if kind is torch.dtype and value in TENSOR_DTYPES:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and value.dtype.name in SCALAR_DTYPES:
        return {"$scalar": [value.dtype.name, value.tobytes().hex()]}
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold without pickle. "
        "Allowed: dict, list, tuple, str, int, float, bool, None, tensors, NumPy arrays and numbers."
    )


def _pack_mapping(value: Any, path: str, tensors: list[torch.Tensor], depth: int) -> Any:
    places = [f"{path}[{key!r}]" for key in value]
    for key, place in zip(value, places):
        if not _is_key(key):
            raise CheckpointError(f"{place}: {type(key).__name__} keys cannot be stored; str, int and tuples can.")
    items = [_pack(item, place, tensors, depth + 1) for item, place in zip(value.values(), places)]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return dict(zip(value, items))
    keys = [_pack(key, path, tensors, depth + 1) for key in value]
    return {_MAPPINGS[type(value)]: [list(pair) for pair in zip(keys, items)]}


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return type(key) in (str, int, float, bool, type(None))


def _checked(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path} is a sparse or quantized tensor; only strided ones are stored: use to_dense() or dequantize()."
        )
    if tensor.dtype not in TENSOR_DTYPES:
        raise CheckpointError(f"{path} has dtype {tensor.dtype}, which safetensors does not take.")
    if tensor.requires_grad:
        raise CheckpointError(f"{path} requires gradients, which a checkpoint does not keep: detach it.")
    return tensor


def _from_numpy(array: np.ndarray, path: str) -> torch.Tensor:
    try:
        tensor = torch.from_numpy(array.copy(order="C"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is an array of dtype {array.dtype}, which safetensors does not take.") from error
    return _checked(tensor, path)


def _separate(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors by position; those that share memory are copied, as safetensors demands."""
    separate, storages = {}, set()
    for i, tensor in enumerate(tensors):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        separate[str(i)] = tensor
    return separate


def _read_tensors(path: Path, num_tensors: int, device: torch.device) -> list[torch.Tensor]:
    if num_tensors == 0:
        return []
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt") as file:
            names = [str(i) for i in range(num_tensors)]
            if set(file.keys()) != set(names):
                raise CheckpointError(f"{path} holds {len(file.keys())} tensors, expected 0 to {num_tensors - 1}.")
            # What safetensors returns is mapped to the file and would hold its blocks after it was deleted.
            tensors = (file.get_tensor(name) for name in names)
            return [tensor.clone() if device.type == "cpu" else tensor.to(device) for tensor in tensors]
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _unpack(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_unpack(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: _unpack(item, tensors) for key, item in node.items()}
    if len(node) > 1 or tag not in _READERS:
        raise ValueError(f"unknown entry {list(node)[:3]}; allowed: {', '.join(_READERS)}")
    return _READERS[tag](node[tag], tensors)


def _unpack_mapping(pairs: Any, tensors: list[torch.Tensor]) -> dict:
    return {_unpack(key, tensors): _unpack(item, tensors) for key, item in pairs}


def _unpack_scalar(content: Any, _: list[torch.Tensor]) -> Any:
    dtype, digits = content
    if dtype not in SCALAR_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r} of a number")
    return np.frombuffer(bytes.fromhex(digits), dtype=dtype)[0]


_READERS: dict[str, Callable[[Any, list[torch.Tensor]], Any]] = {
    "$int": lambda text, _: int(text, 16),
    "$float": lambda text, _: float(text),
    "$tuple": lambda items, tensors: tuple(_unpack(items, tensors)),
    "$size": lambda items, tensors: torch.Size(_unpack(items, tensors)),
    "$dict": _unpack_mapping,
    "$ordered_dict": lambda pairs, tensors: OrderedDict(_unpack_mapping(pairs, tensors)),
    "$counter": lambda pairs, tensors: Counter(_unpack_mapping(pairs, tensors)),
    "$tensor": lambda i, tensors: tensors[i],
    "$array": lambda i, tensors: tensors[i].cpu().numpy(),
    "$scalar": _unpack_scalar,
    "$dtype": lambda name, _: _DTYPES[name],
}
