"""The copies that are pushed: what of a checkpoint, or of the output folder, may leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoints.format.manifest import Manifest
from ..checkpoints.format.stored import Stored
from ..checkpoints.merging import check_mergeable, write_merged
from ..checkpoints.state.sharded_weights import SHARDED
from ..errors import ArgumentError
from ..hub.allowed import holds_model
from ..hub.pins import pin_files, unpin
from ..hub.pushing import list_sources
from .exporter import save_pretrained

CARD = "README.md"


def pin_export(folder: Path) -> Path:
    """A copy of what an output folder may share."""
    return pin_files(list_sources(folder), folder.absolute().parent, folder.absolute().name)


def pin_checkpoint(folder: Path, model: Any, takes_whole: bool) -> Path:
    """A copy of a checkpoint's model, as a whole one.

    Args:
        folder: of the checkpoint.
        model: the one that was saved there, whole; None where that is not at hand.
        takes_whole: whether the whole checkpoint comes with it.

    Raises:
        ArgumentError: `folder` holds no whole model, and `model` is None.
    """
    is_model, is_sharded = holds_model(folder), (folder / SHARDED).is_file()
    if is_sharded:
        check_mergeable(folder)
    sources = list_sources(folder, folder if takes_whole else None, needs_model=is_model)
    sources.pop(CARD, None)  # PEFT's template
    if not (is_model or is_sharded) and model is None:
        raise ArgumentError(
            f"{folder} is no whole model, but what trains of one or pieces of one, and the whole is not at hand. "
            "The next checkpoint, or the trained model, is pushed in its place."
        )
    pinned = pin_files(sources, folder.parent, folder.parent.name)
    if is_model:
        return pinned
    try:
        if is_sharded:
            write_merged(Stored(folder, Manifest.read(folder)), pinned)
        else:
            save_pretrained(model, pinned)
        (pinned / CARD).unlink(missing_ok=True)
    except BaseException:
        unpin(pinned)
        raise
    return pinned
