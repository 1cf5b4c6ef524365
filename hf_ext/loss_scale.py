"""Loss scaling watched: a few steps left out while the scale is sought are normal, more are not.

In float16 the loss is multiplied by a scale, so that small gradients do not vanish; `torch.amp.GradScaler` leaves out
each step whose gradients are not finite and halves the scale. It does so for ever, in silence: with a row whose
gradients are NaN the scale falls to 0 and the weights never move again. `accelerator.optimizer_step_was_skipped` does
not tell either: a fused optimizer is stepped all the same and leaves the step out by itself, on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

# From 65536, where scalers start, 1 is reached in 16 halvings; a higher start may take a few more.
MAX_OVERFLOWS_IN_A_ROW = 20
LOWEST_SCALE = 1.0  # here nothing is scaled up any more: the gradients themselves are not finite
REMEMBERED = 4


@dataclass
class OverflowWatch:
    """Counts the steps that a `GradScaler` leaves out and says when they have become too many.

    Args:
        scaler: has `get_scale()`, which waits for the device; asked only at a step that is left out.
    """

    scaler: Any
    num_in_a_row: int = 0
    num_in_all: int = 0
    steps: deque[Any] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note_finite(self) -> None:
        """A step with finite gradients was made."""
        self.num_in_a_row = 0

    def note_overflow(self, step: Any) -> str | None:
        """A step is left out; `step` is whatever names it later, in `steps`.

        Returns:
            None where the scaler may go on, else why not.
        """
        self.num_in_a_row += 1
        self.num_in_all += 1
        self.steps.append(step)
        scale = self.scaler.get_scale()
        if scale <= LOWEST_SCALE:
            return f"a loss scale of {scale:.12g} (it starts at 65536 and is halved at each step that is left out)"
        if self.num_in_a_row >= MAX_OVERFLOWS_IN_A_ROW:
            return f"{self.num_in_a_row} steps in a row, at a loss scale of {scale:.12g} by now"
        return None
