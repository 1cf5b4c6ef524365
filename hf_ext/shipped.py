"""Where the files are that come with hf_ext: recipes, their YAML files, and those of Accelerate's launcher.

In a clone these folders stand at its top level, also where it was installed with `pip install -e`; a wheel has them
inside the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_PARENT = _PACKAGE if (_PACKAGE / "accelerate_configs").is_dir() else _PACKAGE.parent

RECIPES, CONFIGS, LAUNCHERS = "recipes", "recipes/configs", "accelerate_configs"
_SUFFIXES = {RECIPES: ".py", CONFIGS: ".yaml", LAUNCHERS: ".yaml"}


def shipped_folder(folder: str) -> Path:
    """One of `RECIPES`, `CONFIGS` and `LAUNCHERS` as a path."""
    return _PARENT / folder


def list_shipped(folder: str) -> list[str]:
    """Names of the files in one of these folders, sorted."""
    return sorted(path.name for path in shipped_folder(folder).glob(f"*{_SUFFIXES[folder]}"))


def find_shipped(text: str, folder: str) -> Path:
    """The file that a user means: what exists under that path, else what comes with hf_ext under that name.

    Args:
        text: a path, or the name of a shipped file, alone (`gb1.yaml`) or as in a clone (`recipes/configs/gb1.yaml`).
        folder: where such files are shipped.

    Returns:
        Its path; `text` as it is, where there is neither.
    """
    path = Path(text)
    if path.exists() or path.parent.as_posix() not in (".", folder):
        return path
    shipped = shipped_folder(folder) / path.name
    return shipped if path.name in list_shipped(folder) else path
