"""Keeps what a run of recipes/max_speed.py measured: scores, decisions, versions; no predictions, no local paths.

python benchmarks/collect.py outputs/gb1 gb1_seed0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_LOCAL = ("cache_dir", "stores")


def without_local_paths(decision: dict[str, Any]) -> dict[str, Any]:
    """A plan's decision without the folders of the machine it was taken on."""
    parts = {name: {k: v for k, v in decision[name].items() if k not in _LOCAL} for name in ("settings", "evidence")}
    return {**decision, **parts}


def collect(folder: Path) -> dict[str, Any]:
    """The measurements of one output folder, JSON-able."""
    results = json.loads((folder / "all_results.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    settings = {key: results["settings"][key] for key in results["settings_from"] if key in _SETTINGS}
    return {
        "settings": settings,
        "preset": plan["preset"],
        "versions": plan["versions"],
        "hardware": {key: plan["hardware"][key] for key in ("name", "num_cores", "memory_gib")},
        "decisions": [without_local_paths(decision) for decision in plan["decisions"]],
        "data": {key: results["data"][key] for key in ("rows_read", "sizes", "leaks")},
        "train": results["train"],
        "best": results["best"],
        "test": results["test"],
    }


_SETTINGS = (
    "tower_training",
    "use_peft",
    "lora_r",
    "pooling",
    "learning_rate",
    "encoder_learning_rate",
    "num_train_epochs",
    "weight_decay",
    "warmup_steps",
    "seed",
    "per_device_train_batch_size",
    "head",
    "head_sizes",
    "head_dropout",
)


def main() -> None:
    """Writes `benchmarks/results/<name>.json` from an output folder."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(collect(folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
