"""Named settings. preset < YAML < command line; `a+b` composes, later wins; every value can be overridden."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from .checks import name_nearest

NO_PRESET = "none"
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # What stock Trainer does: the control of every comparison.
    "baseline": {"speedups": [], "cached_batch_size": None},
    # Everything that leaves learning as it is (classes I and N), and a larger batch for heads on cached embeddings.
    "max_speed": {"speedups": ["all"], "cached_batch_size": 1024},
    # Small cards: one row at a time through encoders that train, activations recomputed, no second copy of anything.
    "low_memory": {
        "speedups": ["all"],
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "cached_batch_size": 256,
        "activation_checkpointing": True,
        "dataloader_pin_memory": False,
    },
    # Validation sets that take longer than is worth it: 5 % of the rows every second epoch; all of them before a new
    # best model replaces the old one, at the end, and every fifth time.
    "quick_eval": {"eval_subset": 0.05, "eval_every_epochs": 2},
    # Small drives: the newest checkpoint (and the best, where it is another one), less of it if it must be; no logs of
    # other tools.
    "low_disk": {"save_total_limit": 1, "report_to": "none"},
    # Same numbers every time on the same machine, at the price of speed.
    "reproducible": {
        "full_determinism": True,
        "data_seed": 42,
        "tf32": False,
        "without": ["numerics"],
    },
}


def preset_names(written: object, presets: Mapping[str, Any] = PRESETS) -> list[str]:
    """Returns the names in "a+b"; none in "", "none" and what is no text.

    Raises:
        ArgumentError: an unknown name, with the nearest known one.
    """
    if not isinstance(written, str) or written.strip() in ("", NO_PRESET):
        return []
    names = [name.strip() for name in written.split("+")]
    for name in names:
        if name not in presets:
            known = ", ".join(sorted(presets)) or "(there are none)"
            raise ArgumentError(f"Unknown preset {name!r} in {written!r}{name_nearest(name, presets)}. Known: {known}.")
    return names


def preset_values(written: object) -> dict[str, Any]:
    """Returns values of "a+b", those of the later name winning."""
    return {key: copy.deepcopy(value) for name in preset_names(written) for key, value in PRESETS[name].items()}
