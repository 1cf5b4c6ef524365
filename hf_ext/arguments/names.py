"""What people call arguments who know other programs, and which argument they mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
