"""Whether a lock came into a folder with a copy of another one, which its run still holds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def is_copied(lock: Path, owner: Mapping[str, Any]) -> bool:
    """Whether `owner`, a living process of this machine, holds another folder than that of `lock`, which names it.

    True only where it is certain: the folder that the owner took has the same lock, and a file that is made here is not
    seen there. Paths, inodes and devices do not tell: one folder may have several (links, mounts, network disks).

    Cost: one empty file, for a moment; none where the owner's folder has no such lock.
    """
    held, identity = owner.get("held"), owner.get("id")
    if not (isinstance(held, str) and isinstance(identity, str) and identity):
        return False
    original = Path(held) / lock.name
    try:
        if not original.is_file() or json.loads(original.read_bytes())["id"] != identity:
            return False
        with tempfile.NamedTemporaryFile(dir=lock.parent, prefix=f"{lock.name}-") as probe:
            return not original.with_name(Path(probe.name).name).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False
