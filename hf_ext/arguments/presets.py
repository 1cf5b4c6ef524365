"""Presets, which are named settings; and which argument or preset is meant by a name that is not known.

Preset < YAML < command line; `a+b` composes, later wins; every value can be overridden.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping

from ..errors import ArgumentError
from ..files import Facts, Json

NO_PRESET = "none"
PRESETS: Mapping[str, Facts] = {
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


def preset_names(written: object, presets: Facts = PRESETS) -> list[str]:
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


def preset_values(written: object) -> Json:
    """Returns values of "a+b", those of the later name winning."""
    return {key: copy.deepcopy(value) for name in preset_names(written) for key, value in PRESETS[name].items()}


# --- names ------------------------------------------------------------------------------------------------------------

# Argument -> what other programs call it; in the order in which they are proposed.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch bs batch_size train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation",
    "num_train_epochs": "epoch epochs num_epochs max_epochs",
    "weight_decay": "wd",
    "speedups": "optim_ext muon cpu_offload packing compile",
    "lora_r": "rank lora_rank",
    "head_dropout": "dropout",
    "early_stopping_patience": "patience",
    "metric_for_best_model": "metric",
    "dataloader_num_workers": "workers",
    "split_sizes": "test_size val_size valid_size",
    "warmup_steps": "warmup warmup_ratio",
    "eval_subset": "max_eval_samples",
    "encoders": "model models model_name encoder model_name_or_path",
    "model_name_or_path": "model model_name encoder encoders",
    "dataset_name": "data dataset train_file csv input fasta",
    "label_column": "label labels target",
    "sequence_columns": "sequence sequences seq",
    "output_dir": "out output outdir",
}
# Subcommand -> arguments of it alone, which people give to others.
_OF_COMMAND = {"doctor": "device", "evaluate": "test_of", "sample": "antigen num_samples", "mlm": "model_size"}


def is_secret(name: str) -> bool:
    """Returns whether an argument of this name may hold a token."""
    return name.endswith("token")


def name_nearest(name: str, known: Iterable[str]) -> str:
    """Returns what a message about an unknown name goes on with: the known one that it may be.

    "" where none is near.
    """
    known = list(known)
    bare = name.lstrip("-").replace("-", "_")
    for command, names in _OF_COMMAND.items():
        if bare in names.split():
            return f", did you mean that of `hf-ext {command}`?"
    ours = [word for one, others in _OTHER_NAMES.items() if bare in others.split() for word in (f"--{one}", one)]
    close = [word for word in ours if word in known] or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f", did you mean {close[0]!r}?" if close else ""
