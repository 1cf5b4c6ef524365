"""Memory that does not suffice, where and when a test says: errors as torch raises them, from inside a model."""

import torch
from torch import nn


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class _Burst(torch.autograd.Function):
    """Passes states on; its backward asks whether there is room."""

    @staticmethod
    def forward(ctx, states, room, rows):
        ctx.room, ctx.rows = room, rows
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad):
        ctx.room.ask("backward", ctx.rows)
        return grad, None, None


class Room:
    """A device with room for so many rows at a time in the layers it watches, while they train.

    Args:
        rows: most rows; None for any number, so that only `calls` fail.
        where: "forward" or "backward".
        calls: numbers, from 1, of the calls of `where` that fail whatever their rows, once each.

    Attributes:
        asked: rows of each call of `where`, in order; `num_failed`: how many did not fit.
    """

    def __init__(self, rows: int | None = None, where: str = "forward", calls: tuple[int, ...] = ()):
        self.rows, self.where, self.calls = rows, where, set(calls)
        self.asked: list[int] = []
        self.num_failed = 0

    def ask(self, where: str, rows: int) -> None:
        if where != self.where:
            return
        self.asked.append(rows)
        if len(self.asked) in self.calls or (self.rows is not None and rows > self.rows):
            self.num_failed += 1
            raise out_of_memory()

    def watch(self, layer: nn.Module):
        """`layer`, whose first argument has a row per sequence and whose result is a tensor."""

        def hook(module, args, output):
            if not module.training:
                return output
            states = output[0] if isinstance(output, tuple) else output
            self.ask("forward", len(states))
            if self.where == "backward" and states.requires_grad:
                states = _Burst.apply(states, self, len(states))
                return (states, *output[1:]) if isinstance(output, tuple) else states
            return output

        layer.register_forward_hook(hook)
        return layer
