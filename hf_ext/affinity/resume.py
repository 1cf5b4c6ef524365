"""What a folder of checkpoints holds and what a re-run would do; or a .pth of another script as a model to go on from.

    hf-ext resume outputs/affinity                     # changes nothing; 0 if --resume auto continues
    hf-ext resume --convert best_model.pth --model igt5_esm2_original.yaml \\
        --output_dir converted --rename regressor.=head.layers. --drop igt5_model. esm2_model.

Converting takes the names and sizes of the model from the config.json in --model, not its weights, or from a YAML file
of hf-ext train, and refuses an entry that it cannot place. The file is read as tensors and numbers only:
nothing in it is run. Exit status: 0 if a run would continue, or the file was converted; 1 if not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..arguments.parser import parse_command
from ..checkpoints.convert import convert
from ..checkpoints.looking import WHOLE, find_next, format_checkpoints, inspect_folder
from ..data.arguments import DataArguments
from ..errors import ArgumentError
from ..models.affinity import AffinityModel
from ..models.configuration import build_config
from ..processes import refuse_several
from ..speedups.lora import lora_settings
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .building import build_collator, model_settings, read_towers, settle_training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parse_arguments(argv)
    refuse_several("resume")
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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
        help="Folder with the config.json of the model it is for, or YAML file of hf-ext train.",
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
    """Configuration, inputs and tokenizers of the model that `hf-ext train --config` would train; loads no weights."""
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
