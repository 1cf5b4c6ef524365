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
from collections.abc import Sequence
from pathlib import Path

from ..checkpoints import CHECKPOINT_NAME, is_folder, is_ours, verify
from ..errors import ArgumentError, CheckpointError
from ..files import used_bytes
from ..processes import refuse_several
from ..text import format_table
from .convert import convert


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
