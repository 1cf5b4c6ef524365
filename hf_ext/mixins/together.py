"""Saving and loading by several processes at once: all succeed, or all hear why not; and which of them hold what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..errors import CheckpointError


class TogetherMixin:
    """What the parts of a checkpoint's way to the disk and back have in common."""

    args: Any
    model: Any
    accelerator: Any
    checkpoints: Any
    is_fsdp_enabled: bool
    is_fsdp2: bool  # of ShardingMixin: each process holds its parts, as DTensors, and writes them
    is_deepspeed_enabled: bool

    @property
    def keeps_library_files(self) -> bool:
        """Whether checkpoints hold, beside our files, those of a library that alone can gather its state: pickles."""
        return bool(self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.is_fsdp2))

    @property
    def stored_model(self) -> Any:
        """The model whose entries checkpoints hold: as it trains, but not the wrapper that torch.compile makes."""
        return getattr(self.model, "_orig_mod", self.model)

    def _together(self, action: Callable[[], None] | None) -> str | None:
        """Runs `action`, if any; returns what the disk refused to any process, the same on all.

        Raises:
            CheckpointError: another process failed for another reason; this one's own error is raised as it is.
        """
        failure = error = None
        try:
            if action is not None:
                action()
        except Exception as raised:  # whatever it is: the others wait for this process
            if is_disk_failure(raised):
                needed = self.checkpoint_sizes().full_bytes  # type: ignore[attr-defined]
                failure = describe_failure(raised, self.checkpoints.folder, needed)
            elif self.args.world_size == 1:
                raise
            else:
                error = raised
        if self.args.world_size == 1:
            return failure
        outcomes = gather_object([(failure, None if error is None else f"{type(error).__name__}: {error}")])
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(outcomes):
            if other is not None:
                raise CheckpointError(f"Process {rank} failed: {other}")
        return next((text for text, _ in outcomes if text is not None), None)

    def _load_together(self, action: Callable[[], None] | None) -> None:
        """As `_together`, which all processes call; raises on all of them if it failed on one."""
        failure = self._together(action)
        if failure is not None:
            raise CheckpointError(failure)
