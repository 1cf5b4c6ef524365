"""What a folder of checkpoints holds and what a re-run would do; or a .pth of another script as a model to go on from.

    hf-ext resume outputs/affinity                     # changes nothing; 0 if --resume auto continues
    hf-ext resume --convert best_model.pth --model outputs/affinity --output_dir converted \\
        --rename regressor.=head.layers. --drop esm.
    hf-ext resume --convert best_model.pth --model igt5_esm2_original.yaml \\
        --output_dir converted --rename regressor.=head.layers. --drop igt5_model. esm2_model.

Converting takes the names and sizes of the model from the config.json in --model, not its weights, or from a YAML file
of recipes/max_speed.py, and refuses an entry that it cannot place. The file is read as tensors and numbers only:
nothing in it is run. Exit status: 0 if a run would continue, or the file was converted; 1 if not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hf_ext.cli import quick_imports

with quick_imports():
    from hf_ext.affinity.arguments import AffinityArguments
    from hf_ext.affinity.building import build_collator, model_settings, read_towers, settle_training
    from hf_ext.checkpoints.convert import convert
    from hf_ext.checkpoints.manifest import CHECKPOINT_NAME, is_folder, is_ours, verify
    from hf_ext.data.arguments import DataArguments
    from hf_ext.errors import ArgumentError, CheckpointError, exit_on_errors
    from hf_ext.files import used_bytes
    from hf_ext.models.affinity import AffinityModel
    from hf_ext.models.configuration import build_config
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.tables import format_table
    from hf_ext.running import parse_command
    from hf_ext.speedups.lora import lora_settings
    from hf_ext.training_args import FastTrainingArguments

WHOLE, WEIGHTS = "verified", "verified, weights alone"
DAMAGED, STOCK, FOREIGN = "damaged", "of stock Trainer, cannot be verified", "no checkpoint"
HEADERS = ("checkpoint", "what it is", "step", "epoch", "MB")


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe; returns the exit status."""
    args = parse_arguments(argv)
    refuse_several("resume_check")
    if args.convert is None:
        checkpoints = inspect_folder(args.folder)
        print(format_checkpoints(args.folder, checkpoints))
        chosen = find_next(checkpoints)
        return 0 if chosen is not None and chosen.kind == WHOLE else 1
    with model_folder(args.model) as model:
        names = convert(args.convert, model, args.output_dir, args.rename, args.drop, tuple(args.label_scale))
    print(
        f"{args.convert}: {len(names['taken'])} tensors are now the model in {args.output_dir}, equal bit for bit; "
        f"{len(names['dropped'])} dropped, {len(names['computed'])} left to the model to compute."
    )
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ArgumentError: flags of both uses, or of neither.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", help="Output folder or one checkpoint to look at.")
    make = parser.add_argument_group("converting")
    make.add_argument("--convert", type=Path, metavar="OLD.pth", help="File that torch.save wrote, to convert.")
    make.add_argument(
        "--model",
        type=Path,
        help="Folder with the config.json of the model it is for, or YAML file of recipes/max_speed.py.",
    )
    make.add_argument("--output_dir", type=Path, help="New folder for the converted model.")
    make.add_argument("--rename", nargs="+", type=as_pair, default=[], metavar="OLD=NEW", help="Prefixes of names.")
    make.add_argument("--drop", nargs="+", default=[], metavar="PREFIX", help="Entries to leave out, as renamed.")
    make.add_argument(
        "--label_scale",
        nargs=2,
        type=float,
        default=[0.0, 1.0],
        metavar=("MEAN", "STD"),
        help="By which the old script standardised labels, if it did (affinity models).",
    )
    args = parser.parse_args(argv)
    if (args.folder is None) == (args.convert is None):
        raise ArgumentError("Give a FOLDER to look at, or --convert OLD.pth --model FOLDER --output_dir NEW.")
    if args.convert is not None and (args.model is None or args.output_dir is None):
        raise ArgumentError(
            "--convert needs --model, a folder with a config.json or a YAML file, and --output_dir, a new folder."
        )
    return args


@contextmanager
def model_folder(given: Path) -> Iterator[Path]:
    """`given`, or of a YAML file a temporary folder with the model that it describes."""
    if given.suffix not in (".yaml", ".yml"):
        yield given
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_untrained(given, scratch)
        yield Path(scratch)


def write_untrained(config_file: Path, folder: str) -> None:
    """Configuration, inputs and tokenizers of the model that `max_speed.py --config` would train; loads no weights."""
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    _, (args, data_args, training_args) = parse_command(types, {}, None, ["--config", str(config_file)])
    args.tower_training, _ = settle_training(args, training_args.use_peft)
    encoders, towers = read_towers(args, data_args.sequence_columns, lora_settings(training_args))
    model = AffinityModel(build_config(encoders, towers, **model_settings(args)))
    model.config.save_pretrained(folder)
    build_collator(model, data_args, args.max_length).save_pretrained(folder)


def as_pair(text: str) -> tuple[str, str]:
    """ "old.=new." as its two sides."""
    old, sign, new = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': give OLD=NEW")
    return old, new


# --- looking ---


@dataclass(frozen=True)
class Found:
    """A folder that is named as a checkpoint.

    Attributes:
        kind: one of the constants above.
        problems: of a damaged one, each "NAME: expected ..., found ...".
    """

    name: str
    kind: str
    step: int
    epoch: float | None
    num_bytes: int
    problems: Sequence[str] = ()


def inspect_folder(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints of an output folder, by step; or the one checkpoint that `folder` itself is.

    Raises:
        CheckpointError: no such folder.

    Cost: reads every file of every checkpoint.
    """
    place = Path(folder).resolve()
    if not place.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, found {'a file' if place.exists() else 'nothing'}.")
    if CHECKPOINT_NAME.search(place.name):
        return [_inspect(place)]
    named = [path for path in place.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(map(_inspect, named), key=lambda found: found.step)


def _inspect(path: Path) -> Found:
    step, num_bytes = int(CHECKPOINT_NAME.findall(path.name)[0]), used_bytes(path)
    if not is_folder(path) or not is_ours(path):
        is_stock = is_folder(path) and (path / "trainer_state.json").is_file()
        return Found(path.name, STOCK if is_stock else FOREIGN, step, None, num_bytes)
    stored, problems = verify(path, step)
    if stored is None:
        return Found(path.name, DAMAGED, step, None, num_bytes, problems)
    kind = WHOLE if any("optim" in name for name in stored.manifest.files) else WEIGHTS
    return Found(path.name, kind, step, stored.manifest.epoch, num_bytes)


def find_next(checkpoints: Sequence[Found]) -> Found | None:
    """The checkpoint that `--resume auto` takes: the highest step that verifies; None where training would begin."""
    return max((one for one in checkpoints if one.kind in (WHOLE, WEIGHTS)), key=lambda one: one.step, default=None)


def format_checkpoints(folder: str, checkpoints: Sequence[Found]) -> str:
    """A table of them, what is wrong with each, and what `--resume auto` would do."""
    rows = [(one.name, one.kind, str(one.step), one.epoch, one.num_bytes / 1e6) for one in checkpoints]
    problems = [f"{one.name}: {problem}" for one in checkpoints for problem in one.problems]
    chosen = find_next(checkpoints)
    if chosen is None:
        outcome = "finds nothing to continue from: training would start at step 0"
    elif chosen.kind == WEIGHTS:
        outcome = f"takes {chosen.name} and refuses it: it holds weights alone; give it as the model to start from"
    else:
        outcome = f"continues from step {chosen.step} (epoch {chosen.epoch or 0:.2f})"
    return "\n".join([folder, *([format_table(rows, HEADERS)] if rows else []), *problems, f"--resume auto {outcome}."])


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
