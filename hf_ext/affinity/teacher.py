"""Predictions of a trained model for the rows of another run, made once and kept in its output folder."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..data.collators import INPUTS_NAME, SequenceCollator
from ..files import follow_umask, replacing
from ..models.encoders import fingerprint_weights
from ..running import check_inputs
from ..trainer import FastTrainer
from ..training_args import FastTrainingArguments
from .predictor import check_predictions, columns_of, load_model

TEACHER_FILE = "teacher_predictions.safetensors"
SPEEDUPS = ["cpu_matmul", "tf32", "fused_gelu", "embedding_cache", "data_loading"]  # those that predictions gain from
logger = logging.getLogger(__name__)
Row = tuple[str, ...]


def fingerprint_teacher(folder: str) -> str:
    """The teacher's weights, configuration and inputs."""
    inputs = json.loads((Path(folder) / INPUTS_NAME).read_text())
    return f"{fingerprint_weights(folder, None)} {json.dumps(inputs, sort_keys=True)}"


def predict_once(
    folder: str, collator: SequenceCollator, args: FastTrainingArguments, rows: Sequence[Row], fingerprint: str
) -> np.ndarray:
    """Predictions of the model in `folder` for `rows`, label units: (n,) float32, the same on all processes.

    They are kept in the output folder, and read there if model and rows are the same.

    Args:
        folder: the model's, as `find_model` gives it; `fingerprint` is what `fingerprint_teacher` says of it.
        collator: of that model.
        args: seed, output folder, embedding cache and batch size.
        rows: sequences in the order of the model's columns.

    Raises:
        ArgumentError: the model cannot be loaded.
        DataError: rows that the model cannot read.
    """
    path = Path(str(args.output_dir)) / TEACHER_FILE
    digest = hashlib.blake2b("\n".join("|".join(row) for row in rows).encode(), digest_size=16).hexdigest()
    identity = json.dumps({"format": 1, "teacher": fingerprint, "rows": digest}, sort_keys=True)
    found = [_read(path, identity) if args.process_index == 0 else None]
    if args.world_size > 1:
        broadcast_object_list(found)
    if found[0] is not None:
        logger.info("The teacher's predictions are read from %s.", path)
        return found[0]
    predictions = _predict(folder, collator, args, rows)
    if args.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            save_file({"predictions": torch.from_numpy(predictions)}, draft, metadata={"key": identity})
            follow_umask(draft)
    return predictions


def _read(path: Path, identity: str) -> np.ndarray | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") == identity:
                return file.get_tensor("predictions").numpy()
    except SafetensorError:
        logger.warning("%s cannot be read; the teacher predicts again.", path)
        return None
    logger.info("%s holds another teacher's predictions or other rows; the teacher predicts again.", path)
    return None


def _predict(folder: str, collator: SequenceCollator, args: FastTrainingArguments, rows: Sequence[Row]) -> np.ndarray:
    """The teacher's predictions for `rows` (its columns, in its order), label units: (n,) float32."""
    table = Dataset.from_dict(dict(zip(columns_of(collator), map(list, zip(*rows)))))
    check_inputs(collator, {"rows": table})
    with tempfile.TemporaryDirectory() as scratch:
        own = FastTrainingArguments(
            output_dir=scratch,
            speedups=SPEEDUPS,
            seed=args.seed,
            use_cpu=args.use_cpu,
            per_device_eval_batch_size=args.per_device_eval_batch_size,
            embedding_cache_dir=args.embedding_cache_dir,
            disable_tqdm=args.disable_tqdm,
            report_to="none",
        )
        trainer = FastTrainer(load_model(folder), own, data_collator=collator)
        predictions = np.asarray(trainer.predict(table).predictions, np.float32).reshape(-1)
        trainer.close()
    return check_predictions(predictions)
