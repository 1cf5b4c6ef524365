"""How to load the model: lines that run as they stand, on made-up inputs."""

from __future__ import annotations

from ..markdown import code, code_block
from .names import PLACEHOLDER, is_hub_id, last_part
from .tasks import TaskCard


def loading_section(task: TaskCard, repo: str) -> list[str]:
    """Markdown: what to install, the code, what it returns, what else must be there."""
    shown = code_block("\n".join(task.loading_code(repo)), "python")
    lines = ["## How to load it", "", f"With {task.package} installed:", "", shown, ""]
    if repo == PLACEHOLDER:
        lines += [f"`{PLACEHOLDER}` is the model's id on the Hub, or the path of its folder.", ""]
    lines += task.loading_notes(repo)
    missing = missing_bases(task)
    if missing:
        names = " and ".join(map(code, missing))
        lines += [
            f"**This repository lacks weights that it needs:** those of {names}, which came from a local folder and "
            "not from the Hub. It loads only where that folder is.",
            "",
        ]
    return lines


def missing_bases(task: TaskCard) -> list[str]:
    """Pretrained models that this one needs, that it does not contain and that are not on the Hub; last parts."""
    if task.contains_bases():
        return []
    found = [
        last_part(base["encoder"])
        for base in task.bases()
        if base.get("training") != "full" and not is_hub_id(base["encoder"], base.get("revision"))
    ]
    return list(dict.fromkeys(found))
