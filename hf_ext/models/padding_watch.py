"""Whether anybody reads what packed encoders do not compute: a gradient that comes back to padding tells.

A label there, or a mean without the mask, reads states that padded encoders have there and packed ones have not.
"""

from __future__ import annotations

from functools import partial

import torch

from ..data.varlen_layout import VarlenLayout

# Of the largest gradient of a token: a mask of -100 in place of minus infinity leaves e^-100 of it.
LEAST = 1e-6


class PaddingWatch:
    """Notes, on the device, whether a gradient has come back to a position of padding since `forget`.

    Cost: two passes over the gradient of an encoder's output; no read from the device.
    """

    def __init__(self) -> None:
        self._found: torch.Tensor | None = None

    def unpack(self, packed: torch.Tensor, segments: VarlenLayout) -> torch.Tensor:
        """As that of `segments`, of the last states of an encoder, whose gradient will be looked at.

        Where it is, padding is not zero.
        """
        is_full = len(segments.indices) == segments.shape[0] * segments.shape[1]
        if is_full or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return segments.unpack(packed)
        try:
            states = packed if packed.requires_grad else packed.detach().requires_grad_()  # a frozen encoder's too
        except RuntimeError:  # inside torch.func, where gradients are asked for otherwise
            return segments.unpack(packed)
        # A token's states in place of zeros, at which squares, norms and products have no gradient.
        flat = segments.scatter(states, filler=packed.detach()[0, 0])
        # Not on the view, which may be changed in place and then has another.
        flat.register_hook(partial(self._note, segments.indices))
        return flat.unflatten(0, segments.shape)

    def _note(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Of states (n * width, features), of which `tokens` are no padding."""
        largest = gradient.detach().abs().amax(-1)
        read = largest.index_fill(0, tokens, 0).max() > LEAST * largest.max()
        self._found = read if self._found is None else self._found.to(read.device) | read

    def forget(self) -> None:
        """What comes next counts."""
        self._found = None

    def is_unread(self, device: torch.device) -> torch.Tensor:
        """Scalar, bool, on `device`."""
        return torch.ones((), dtype=torch.bool, device=device) if self._found is None else ~self._found.to(device)
