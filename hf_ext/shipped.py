"""Where the files are that come with hf_ext: recipes, their YAML files, those of Accelerate's launcher, templates.

In a clone these folders stand at its top level, also where it was installed with `pip install -e`; a wheel has them
inside the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_PARENT = _PACKAGE if (_PACKAGE / "accelerate_configs").is_dir() else _PACKAGE.parent

RECIPES, CONFIGS, LAUNCHERS, TEMPLATES = "recipes", "recipes/configs", "accelerate_configs", "launch"
_SUFFIXES = {RECIPES: {".py"}, CONFIGS: {".yaml"}, LAUNCHERS: {".yaml"}, TEMPLATES: {".py", ".sbatch", ".yaml"}}


def shipped_folder(folder: str) -> Path:
    """One of `RECIPES`, `CONFIGS`, `LAUNCHERS` and `TEMPLATES` as a path."""
    return _PARENT / folder


def list_shipped(folder: str) -> list[str]:
    """Names of the files in one of these folders, sorted."""
    return sorted(path.name for path in shipped_folder(folder).iterdir() if path.suffix in _SUFFIXES[folder])


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
