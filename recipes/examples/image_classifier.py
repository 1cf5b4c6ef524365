"""Any vision model: ViT from scratch tells which shape stands somewhere in a noisy image.

    accelerate launch recipes/examples/image_classifier.py               # generated data
    accelerate launch recipes/examples/image_classifier.py --activation_checkpointing true  # less memory

What is said of proteins elsewhere holds here: the plan says of each speed-up whether it serves this model, killed runs
go on where they were (`--resume auto`, the default), and beside the score stands that of the most frequent class.
`--stock_trainer true` trains with transformers.Trainer itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from any_model import DEFAULTS, ClassifierTask, data_seed
from datasets import Dataset
from transformers import ViTConfig, ViTForImageClassification

from hf_ext import Run, exit_on_errors

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SIZE = 24  # pixels
SHAPES = {  # 5 x 5, as many pixels in each
    "cross": np.array([[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]]),
    "corner": np.array([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "diagonals": np.array([[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]]),
}


def make_rows(num_rows: int, seed: int) -> Dataset:
    """Grey images (24, 24) of noise with one of three shapes of equal brightness, anywhere; label: which."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, len(SHAPES), num_rows)
    images = generator.integers(0, 60, (num_rows, SIZE, SIZE), dtype=np.uint8)
    for image, label in zip(images, labels):
        top, left = generator.integers(0, SIZE - 5, 2)
        image[top : top + 5, left : left + 5] += 190 * [*SHAPES.values()][label].astype(np.uint8)
    return Dataset.from_dict({"image": [image.tobytes() for image in images], "labels": labels})


def to_pixels(batch: dict[str, Any]) -> dict[str, Any]:
    """What an image processor does, row by row as they are read: bytes to floats around 0, (1, 24, 24)."""
    images = [torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in batch["image"]]
    return {"pixel_values": [i.view(1, SIZE, SIZE) / 127.5 - 1 for i in images], "labels": batch["labels"]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`pixel_values` (n, 1, 24, 24) and `labels` (n,)."""
    labels = torch.tensor([row["labels"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


class ImageClassifier(ClassifierTask):
    """Train ViT from scratch to tell which shape stands somewhere in a noisy image, on generated rows."""

    recipe = "examples/image_classifier"
    defaults = {
        **DEFAULTS,
        "output_dir": "outputs/image_classifier",
        "learning_rate": 2e-3,
        "num_train_epochs": 4,
        "remove_unused_columns": False,  # the transform reads `image`, which the model does not
        "metric_for_best_model": "accuracy",
    }

    def load(self, run: Run) -> Dataset:
        """All rows, those of training first; images are read row by row."""
        return make_rows(run.model_args.num_rows + run.model_args.num_test_rows, data_seed(run.args))

    def build(self, run: Run, data: Dataset) -> dict[str, Any]:
        """What Trainer takes."""
        image: dict[str, Any] = {"image_size": SIZE, "patch_size": 4, "num_channels": 1, "num_labels": len(SHAPES)}
        model = ViTForImageClassification(ViTConfig(**image, **SHAPE))
        return {"model": model, "data_collator": collate, **self.split(run, data.with_transform(to_pixels))}


if __name__ == "__main__":
    with exit_on_errors():
        ImageClassifier().main()
