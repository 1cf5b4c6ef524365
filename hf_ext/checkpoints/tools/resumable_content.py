"""What a resumed run would take from one checkpoint, and what that checkpoint lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..format.manifest import Manifest
from ..format.tensor_files import read_json
from ..state.sharded_weights import SHARDED, WEIGHTS
from ..state.weights import ADAPTER_FILES, MODEL_FILES, TRAINABLE

_SHARD = re.compile(r"(model|pytorch_model)-[0-9]+-of-[0-9]+\.(safetensors|bin)")
_OF_LIBRARY = re.compile(r"zero/|global_step\d+/|pytorch_model_fsdp")  # DeepSpeed's, and Accelerate's of FSDP1
_WEIGHTS = frozenset({TRAINABLE, *MODEL_FILES, *ADAPTER_FILES})


@dataclass(frozen=True)
class Contents:
    """What `train` restores.

    Attributes:
        restores: part -> in what form.
        lacks: what would have to begin anew; training goes on, but not exactly.
        essential: what is missing without which nothing can be continued.
        only_model: saved with `save_only_model`.
        best_step: step of the best checkpoint, as this one knows it.
    """

    restores: dict[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    essential: tuple[str, ...] = ()
    only_model: bool = False
    best_step: int | None = None


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    """Of a verified checkpoint of hf_ext. Cost: reads its JSON files.

    Raises:
        CheckpointError: a JSON file that every checkpoint has is missing or not one.
    """
    files, facts = manifest.files, manifest.facts
    progress, state = read_json(folder / "progress.json"), read_json(folder / "trainer_state.json")
    arguments = facts.get("arguments") or {}
    only_model = bool(progress.get("only_model"))
    stripped = facts.get("stripped") or ()
    sizes = {name: record.size for name, record in files.items()}
    restores, lacks, essential = {"weights": describe_weights(sizes)}, [], []
    if SHARDED not in files and any(_OF_LIBRARY.match(name) for name in files):
        restores["optimizer"] = "spread over processes; the library that wrote it reads it"
        restores["weights"] = restores["weights"] or restores["optimizer"]
    else:
        essential = ["weights"] if not restores["weights"] else []
        for part in ("optimizer", "scheduler"):
            if f"{part}.json" in files:
                restores[part] = str(read_json(folder / f"{part}.json").get("tree", {}).get("class"))
            elif not only_model and f"{part}.json" not in stripped:
                essential.append(f"{part}.json")
        if arguments.get("disk_policy") == "degrade" and "optimizer" in restores:
            restores["optimizer"] += ", perhaps rounded to bfloat16 (--disk_policy degrade)"
    if "scaler.json" in files:
        restores["loss scale"] = "yes"
    lacks += [] if "scaler.json" in files or not arguments.get("fp16") or only_model else ["loss scale"]
    ranks, expected = [n for n in files if re.fullmatch(r"rank_\d+\.json", n)], int(facts.get("world_size", 1))
    if ranks:
        restores["random states"] = f"of {len(ranks)} process(es)"
        restores["loss since the last log"] = f"since step {progress.get('last_logged_step')}"
    if len(ranks) < expected:
        lacks.append(f"random states of {expected - len(ranks)} of {expected} process(es)")
    restores["place in the data"] = "by number of steps" if progress.get("data_position") is None else "of the stream"
    restores["interrupted evaluation"] = "made up first" if progress.get("evaluation_pending") else "none"
    restores["callbacks"] = ", ".join(state.get("stateful_callbacks") or {}) or "none"
    if "early_stopping.json" in files:
        restores["early stopping"] = "decisions, best and recent predictions"
    lacks += [section for section in ("arguments", "data", "model") if section not in facts]
    best = state.get("best_global_step") or progress.get("best_saved_step")
    return Contents(restores, tuple(lacks), tuple(essential), only_model, best)


def read_stock_contents(folder: Path, state: Mapping[str, Any]) -> Contents:
    """Of a checkpoint that stock Trainer wrote, by the names of its files.

    Args:
        state: what its `trainer_state.json` holds.
    """
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    restores, lacks = {}, []
    for part, name in (("optimizer", "optimizer.pt"), ("scheduler", "scheduler.pt"), ("loss scale", "scaler.pt")):
        if name in sizes:
            restores[part] = name
        elif part != "loss scale":
            lacks.append(part)
    ranks = [name for name in sizes if re.fullmatch(r"rng_state(_\d+)?\.pth", name)]
    if ranks:
        restores["random states"] = f"of {len(ranks)} process(es)"
    else:
        lacks.append("random states")
    restores["place in the data"] = "by number of steps"
    restores["callbacks"] = ", ".join(state.get("stateful_callbacks") or {}) or "none"
    lacks += ["hashes to verify it by", "loss since the last log", "arguments, data and model to compare a run with"]
    weights = describe_weights(sizes)
    essential = () if weights else ("weights",)
    return Contents({"weights": weights, **restores}, tuple(lacks), essential, False, state.get("best_global_step"))


def describe_weights(sizes: Mapping[str, int]) -> str:
    """The files that hold weights, with their bytes; "" without any."""
    parts = [size for name, size in sizes.items() if name.startswith(f"{WEIGHTS}/")]
    if SHARDED in sizes and parts:
        return f"{WEIGHTS} ({sum(parts):,} bytes in {len(parts)} file(s), of any number of processes)"
    names: Iterable[str] = (n for n in sizes if PurePosixPath(n).name in _WEIGHTS or _SHARD.fullmatch(n))
    return ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in names)
