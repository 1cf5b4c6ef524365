"""What a folder of checkpoints holds and what a re-run would do; or a .pth of another script as a model to go on from.

    hf-ext resume outputs/affinity                     # changes nothing; 0 if --resume auto continues
    hf-ext resume --convert best_model.pth --config igt5_esm2_original.yaml \\
        --output_dir converted --rename regressor.=head.layers. --drop igt5_model. esm2_model.

Converting makes the model that hf-ext train would make of the YAML file, and gives it the weights of the .pth: every
entry of both must have its place. The file is read as tensors and numbers only: nothing in it is run. Exit status: 0 if
a run would continue, or the file was converted; 1 if not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import parse_command
from ..checkpoints import CHECKPOINT_NAME, check_finite, is_folder, is_ours, name_some, verify
from ..data import DataArguments
from ..errors import ArgumentError, CheckpointError
from ..files import used_bytes
from ..models import AffinityModel, build_config
from ..processes import refuse_several
from ..property import AffinityArguments, build_collator, model_settings, read_towers, resolve_training
from ..speedups import lora_settings
from ..text import format_table
from ..training_args import FastTrainingArguments

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model")
# The standardisation of a head's inputs, which is the identity until it is measured.
_STANDARDISATION = ("head.input_mean", "head.input_scale")
# What SciPy and NumPy return as a metric, which scripts save beside the weights, is pickled by this function.
_NUMBERS: list[Any] = [np.dtype, type(np.dtype("f4")), type(np.dtype("f8"))]
_NUMBERS += [(np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status.

    Raises:
        ArgumentError: flags of both uses, or of neither.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", help="Output folder or one checkpoint to look at.")
    make = parser.add_argument_group("converting")
    make.add_argument("--convert", type=Path, metavar="OLD.pth", help="File that torch.save wrote, to convert.")
    make.add_argument("--config", metavar="FILE.yaml", help="YAML file of hf-ext train, of the model that it is for.")
    make.add_argument("--output_dir", type=Path, help="New folder for the converted model.")
    make.add_argument("--rename", nargs="+", type=_as_pair, default=[], metavar="OLD=NEW", help="Prefixes of names.")
    make.add_argument("--drop", nargs="+", default=[], metavar="PREFIX", help="Entries to leave out, as renamed.")
    args = parser.parse_args(argv)
    refuse_several("resume")
    if (args.folder is None) == (args.convert is None):
        raise ArgumentError("Give a FOLDER to look at, or --convert OLD.pth --config FILE.yaml --output_dir NEW.")
    if args.convert is None:
        return list_checkpoints(args.folder)
    if args.config is None or args.output_dir is None:
        raise ArgumentError("--convert needs --config, a YAML file of hf-ext train, and --output_dir, a new folder.")
    convert(args.convert, args.config, args.output_dir, args.rename, args.drop)
    return 0


def _as_pair(text: str) -> tuple[str, str]:
    """Splits "old.=new." into its two sides."""
    old, sign, new = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': give OLD=NEW")
    return old, new


# --- looking --------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: str) -> int:
    """Prints what the checkpoints of an output folder are, or the one that it is itself, and what a re-run would do.

    Returns:
        0 if `--resume auto` would continue, else 1.

    Raises:
        CheckpointError: no such folder.

    Cost: reads every file of every checkpoint.
    """
    place = Path(folder).resolve()
    if not place.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, found {'a file' if place.exists() else 'nothing'}.")
    paths = [path for path in place.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    paths = [place] if CHECKPOINT_NAME.search(place.name) else paths
    steps = {path: int(CHECKPOINT_NAME.findall(path.name)[0]) for path in paths}
    rows = []
    problems = []
    newest = None
    for path, step in sorted(steps.items(), key=lambda item: item[1]):
        kind = "not written by hf_ext, cannot be verified"
        epoch = None
        if is_folder(path) and is_ours(path):
            stored, wrong = verify(path, step)
            kind = "damaged" if stored is None else "verified"
            problems += [f"{path.name}: {problem}" for problem in wrong]
            if stored is not None:
                newest = stored
                epoch = stored.manifest.epoch
        rows.append((path.name, kind, str(step), epoch, used_bytes(path) / 1e6))
    outcome = "finds nothing to continue from: training would start at step 0"
    if newest is not None and not any("optim" in name for name in newest.manifest.files):
        outcome = f"refuses {newest.path.name}, which holds weights alone: give it as the model to start from"
        newest = None
    elif newest is not None:
        outcome = f"continues from step {newest.step} (epoch {newest.manifest.epoch:.2f})"
    table = [format_table(rows, ("checkpoint", "what it is", "step", "epoch", "MB"))] if rows else []
    print("\n".join([folder, *table, *problems, f"--resume auto {outcome}."]))
    return 0 if newest is not None else 1


# --- converting -----------------------------------------------------------------------------------------------------


def convert(
    old: Path, config: str, output_dir: Path, rename: Sequence[tuple[str, str]] = (), drop: Sequence[str] = ()
) -> None:
    """Writes the weights of `old` as the model that `hf-ext train --config` would train; loads no other weights.

    Args:
        old: of tensors, numbers and dictionaries of them; nothing in it is run.
        rename: (old prefix, new prefix) of names; of several that fit a name, the first. "" stands for every name.
        drop: prefixes, after renaming, of entries to leave out.

    Raises:
        ArgumentError: `output_dir` is not empty, or weights are not finite.
        CheckpointError: the file cannot be read, or its entries are not those of the model; names them.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ArgumentError(f"--output_dir {output_dir}: not empty. Nothing is overwritten: give a new folder.")
    tensors = {}
    for name, tensor in _read_weights(old).items():
        before, after = next((pair for pair in rename if name.startswith(pair[0])), ("", ""))
        tensors[after + name.removeprefix(before)] = tensor
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(drop))}
    check_finite(old, tensors)
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    _, (args, data_args, training_args) = parse_command(types, {}, None, ["--config", config])
    if data_args.task not in ("auto", "regression") or len(data_args.label_column) > 1:
        raise ArgumentError(f"{config}: --convert makes models of one number per row, and this file asks for others.")
    args.tower_training, _ = resolve_training(args, training_args.use_peft)
    encoders, towers = read_towers(args, data_args.sequence_columns, lora_settings(training_args))
    model = AffinityModel(build_config(encoders, towers, **model_settings(args)))
    model.config.label_mean = 0.0
    model.config.label_std = 1.0
    model.config.is_scaled = True
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # of another shape: names them, with both shapes
        raise CheckpointError(f"{old} does not fit this model; nothing was written. {error}") from error
    missing = [name for name in missing if name not in _STANDARDISATION]
    if missing or unexpected:
        raise CheckpointError(
            f"{old} does not fit this model; nothing was written.\n  missing: {name_some(missing)}\n  not in this "
            f"model: {name_some(unexpected)}\n--rename OLD=NEW changes the beginning of names, --drop PREFIX leaves "
            "entries out. Frozen encoders are named by an affinity model, not stored in it: drop them, unless they "
            "were trained; then give a file whose towers train (tower_training: full)."
        )
    model.save_pretrained(str(output_dir))
    build_collator(model, data_args, args.max_length).save_pretrained(str(output_dir))
    print(f"{old}: {len(tensors)} tensors are now the model in {output_dir}.")


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Reads tensors by name, without the prefixes that torch.compile and DataParallel (DDP too) put before names."""
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for a damaged or hostile file has no common class
        raise CheckpointError(
            f"{path}: not there, damaged, or more than tensors and numbers; nothing was run. If you made this file "
            "yourself, load it where it was made and save its tensors alone: "
            "torch.save({'model_state_dict': model.state_dict()}, NEW)."
        ) from error
    for weights in [content, *map(content.get, WEIGHT_KEYS)] if isinstance(content, Mapping) else []:
        if isinstance(weights, Mapping) and weights and all(map(torch.is_tensor, weights.values())):
            return {name.replace("_orig_mod.", "").removeprefix("module."): t for name, t in weights.items()}
    raise CheckpointError(
        f"{path}: expected names and tensors, as model.state_dict(), alone or as one of {', '.join(WEIGHT_KEYS)}. Save "
        "such a file where it was made: torch.save({'model_state_dict': model.state_dict()}, NEW)."
    )
