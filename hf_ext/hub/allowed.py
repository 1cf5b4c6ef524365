"""Which files of a model folder may leave this machine, and what of their content."""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path

from ..checkpoints.finished_model import CONFIG, MODEL_MANIFEST, TOKENIZER, WEIGHTS
from ..checkpoints.format.manifest import MANIFEST, Manifest
from ..errors import ArgumentError
from .attempts import HubError

_ABOUT = r"README\.md|LICENSE|report\.(html|md)|(loss|scatter)\.png"
_ALLOWED = re.compile(rf"{WEIGHTS}|{CONFIG}|{_ABOUT}|{re.escape(MODEL_MANIFEST)}|(tokenizers/\d+/)?({TOKENIZER})")
IS_WEIGHTS = re.compile(WEIGHTS)
# What decides which weights `from_pretrained` reads. A leftover of an earlier push would be read beside or instead of
# the new model: model.safetensors before an index, adapters on top of a full model; or would vouch for another model.
DECIDES_LOADING = re.compile(
    rf"{WEIGHTS}|{re.escape(MODEL_MANIFEST)}|adapter_config\.json|(pytorch|adapter)_model.*\.bin(\.index\.json)?"
)
_OF_CHECKPOINT = (".json", ".safetensors", ".txt", ".md", ".model", ".jinja")  # no pickle, nothing that can be run
_ANY_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")  # the form of the Hub's access tokens


def holds_model(folder: str | os.PathLike[str]) -> bool:
    """Whether there are weights that `from_pretrained` reads; checkpoints may hold only those that train."""
    return any(IS_WEIGHTS.fullmatch(name) for name in os.listdir(folder))


def allow_list(folder: str | os.PathLike[str], needs_weights: bool = True) -> list[str]:
    """Names the files of a model folder that may leave this machine: those known to be needed, and no others.

    Weights as safetensors (whole, sharded, adapters), configuration, tokenizers, `inputs.json`, the manifest of these,
    the card and the report with its two figures. So never pickles, arguments, optimizer, random states, logs, the plan,
    predictions or data.
    Symbolic links are left out: a link may have an allowed name and lead to anything.

    Returns:
        Sorted POSIX paths relative to `folder`.

    Raises:
        ArgumentError: no such folder, or it holds no weights and `needs_weights`.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ArgumentError(f"{root} is not a folder. Give one that `save_model` or `save_pretrained` wrote.")
    here = root.resolve()
    paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    names = [path.as_posix() for path in paths if (root / path).resolve() == here / path]
    allowed = sorted(name for name in names if _ALLOWED.fullmatch(name))
    if needs_weights and not any(IS_WEIGHTS.fullmatch(name) for name in allowed):
        raise ArgumentError(
            f"{root} holds no weights to push: no model.safetensors, shards of it, or adapter_model.safetensors. "
            "Give a folder that `save_model` or `save_pretrained` wrote."
        )
    return allowed


def checkpoint_files(folder: str | os.PathLike[str]) -> list[str]:
    """Names the files of a checkpoint of hf_ext, all of which a run needs that continues from it elsewhere.

    So also optimizer and random states, and the arguments, without tokens. Files that its manifest does not list stay.

    Returns:
        Sorted POSIX paths relative to `folder`.

    Raises:
        ArgumentError: it holds other than tensors and text, as checkpoints of models spread by FSDP or DeepSpeed do.
        CheckpointError: no checkpoint of hf_ext, or its manifest is damaged.
    """
    names = sorted([MANIFEST, *Manifest.read(folder).files])
    others = [name for name in names if not name.endswith(_OF_CHECKPOINT)]
    if others:
        raise ArgumentError(f"{folder} holds {', '.join(others)}; only {', '.join(_OF_CHECKPOINT)} leave this machine.")
    return names


def refuse_tokens(folder: Path, names: list[str], token: str) -> None:
    """Raises HubError if one of the named files contains `token` or anything that has the form of a token.

    Cost: one read of the files.
    """
    for name in names:
        if os.path.getsize(folder / name) == 0:  # cannot be mapped
            continue
        with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(token.encode()) >= 0 or _ANY_TOKEN.search(content):
                raise HubError(
                    f"{name} contains an access token of the Hub; nothing was sent. Take it out of the file, and if "
                    "others could read the file, revoke the token at https://huggingface.co/settings/tokens."
                )


def shorten_encoder_paths(folder: Path) -> None:
    """Leaves of the encoders' absolute paths in `config.json` the last part: they name people and machines.

    Only of encoders whose weights are in the folder; other paths stay, since loading reads them.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    kind = config.get("model_type")
    if kind == "hf_ext_affinity":
        encoders, whole = config["encoders"], ["full"]
    elif kind == "hf_ext_generator":  # which is saved whole with adapters too
        encoders, whole = [*filter(None, [config.get("antigen_encoder")])], ["full", "lora"]
    else:
        return
    for encoder in encoders:
        encoder["config"].pop("_name_or_path", None)  # the same path again, which nothing reads
        if os.path.isabs(encoder["name_or_path"]) and (config["save_full"] or encoder["training"] in whole):
            encoder["name_or_path"] = os.path.basename(os.path.normpath(encoder["name_or_path"]))
    file.write_text(json.dumps(config, indent=2) + "\n")
