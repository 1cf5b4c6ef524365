"""A trained generator from its folder or from the Hub: verified, from safetensors alone, without code of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..affinity.predictor import find_device
from ..checkpoints.finished_model import MODEL_MANIFEST, open_model
from ..data.antibodies import ANTIGEN_TOKENIZER
from ..errors import ArgumentError
from ..models.configuration import EncoderSpec
from ..models.encoders import load_tokenizer
from ..models.generation.configuration import GeneratorConfig
from ..models.generation.model import AntibodyGenerator
from ..pretrained import fetch_folder, reading

# What a model needs; never pickled weights, whatever else lies in a repository.
_FILES = [
    *("config.json", "generation_config.json", "inputs.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "tokenizers/*", MODEL_MANIFEST),
]


@dataclass(frozen=True)
class LoadedGenerator:
    """`model`: in evaluation mode. `tokenizer`: of antigens, as of `PairEncoder`: None for the generator's own."""

    model: AntibodyGenerator
    tokenizer: Any

    @property
    def knows_affinity(self) -> bool:
        """Whether it was trained on measured affinities: else an asked-for one is a number that it has never seen."""
        config: Any = self.model.config
        return (config.label_mean, config.label_std) != (GeneratorConfig.label_mean, GeneratorConfig.label_std)


def load_generator(
    name_or_path: str | Path, *, revision: str | None = None, device: str | torch.device | None = None
) -> LoadedGenerator:
    """Loads what `recipes/generate_antibody.py` wrote.

    Args:
        name_or_path: folder or Hub id. A folder of that name comes first.
        revision: commit, tag or branch of a Hub model; a commit makes samples repeatable.
        device: None takes the accelerator where there is one, else the CPU.

    Raises:
        ArgumentError: no such model, one of another kind or damaged, files that are not those of its manifest, or an
            encoder that it refers to is not there.

    Cost: one read of the files to verify them, and of a Hub model one download, which the Hub's cache keeps.
    """
    folder = fetch_folder(name_or_path, revision, _FILES)
    remedy = "Give the output folder of recipes/generate_antibody.py, or the Hub id it was pushed to."
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"Model {name_or_path}: no config.json there. {remedy}")
    with reading(f"{folder / 'config.json'}: damaged, no model_type", folder, "Copy it, or download it, again."):
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    if kind != GeneratorConfig.model_type:
        raise ArgumentError(f"Model {name_or_path} is of type {kind!r}, not a generator of antibodies. {remedy}")
    model = open_model(AntibodyGenerator, folder, use_safetensors=True)
    tokenizer = None
    if model.config.architecture == "esm":
        spec = EncoderSpec(**model.config.antigen_encoder)
        own = folder / ANTIGEN_TOKENIZER
        tokenizer = load_tokenizer(str(own)) if own.is_dir() else load_tokenizer(spec.name_or_path, spec.revision)
    return LoadedGenerator(model.to(find_device() if device is None else device).eval(), tokenizer)
