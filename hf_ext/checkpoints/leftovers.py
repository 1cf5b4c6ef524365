"""What a killed process leaves in a folder of checkpoints, and how it is told from everything else there."""

from __future__ import annotations

import logging
from pathlib import Path

from ..disk import remove, remove_folder
from .manifest import MANIFEST, MANIFEST_DRAFT
from .stored import is_folder, read_stored

logger = logging.getLogger(__name__)


def clear_staging(path: Path) -> None:
    """Removes a staging folder, or whatever has its name. Raises OSError where the disk refuses."""
    if is_folder(path):
        remove_folder(path)
    else:
        remove(path)


def remove_trash(trash: Path) -> bool:
    """Deletes a renamed checkpoint; False, with a warning, where the disk refuses."""
    try:
        remove_folder(trash, last=MANIFEST)
    except OSError as error:
        logger.warning("%s could not be deleted: %s. The next start tries again.", trash, error.strerror)
        return False
    return True


def sweep_trash(trash: Path, step: int) -> None:
    """Goes on deleting a checkpoint whose deletion was interrupted. Raises OSError where the disk refuses."""
    # A deletion takes the manifest last: files without one were put there by someone else.
    if read_stored(trash, step) or (is_folder(trash) and not any(trash.iterdir())):
        remove_folder(trash, last=MANIFEST)
    else:
        logger.warning("%s is not a deleted checkpoint of hf_ext and is left alone.", trash)


def tidy(folder: Path, step: int) -> None:
    """Removes from a checkpoint what a killed commit or `strip` left. Raises OSError where the disk refuses."""
    stored = read_stored(folder, step)
    if stored is None:
        return
    remove(folder / MANIFEST_DRAFT)
    for name in stored.stripped:
        inside = (folder / name).parent.resolve() == (folder.resolve() / name).parent
        if name not in stored.manifest.files and inside:
            remove(folder / name)
