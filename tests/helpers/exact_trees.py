"""Compares trees bit for bit."""

import numpy as np
import torch


def differences(old, new, path="tree") -> list[str]:
    """Where two trees differ in type, dtype, shape, order or a single bit."""
    if type(old) is not type(new):
        return [f"{path}: {type(old).__name__} became {type(new).__name__}"]
    if isinstance(old, dict):
        if [(type(key), repr(key)) for key in old] != [(type(key), repr(key)) for key in new]:
            return [f"{path}: keys {list(old)} became {list(new)}"]
        return [line for key in old for line in differences(old[key], new[key], f"{path}[{key!r}]")]
    if isinstance(old, list | tuple):
        if len(old) != len(new):
            return [f"{path}: {len(old)} items became {len(new)}"]
        return [line for i, pair in enumerate(zip(old, new)) for line in differences(*pair, f"{path}[{i}]")]
    if isinstance(old, torch.Tensor):
        old, new = (
            (
                t.dtype,
                t.shape,
                t.clone(memory_format=torch.contiguous_format)
                .resolve_conj()
                .resolve_neg()
                .flatten()
                .view(torch.uint8)
                .tolist(),
            )
            for t in (old, new)
        )
    elif isinstance(old, np.ndarray | np.generic):
        old, new = ((a.dtype, a.shape, a.tobytes()) for a in (old, new))
    elif isinstance(old, float):
        old, new = old.hex(), new.hex()
    return [] if old == new else [f"{path}: {old!r} became {new!r}"]
