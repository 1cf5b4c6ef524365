"""What a folder of checkpoints holds and what a re-run would do; or a .pth of another script as a model to go on from.

    hf-ext resume outputs/affinity                     # changes nothing; 0 if --resume auto continues
    hf-ext resume outputs/affinity/checkpoint-400 --arguments --json report.json
    hf-ext resume --convert best_model.pth --model outputs/affinity --output_dir converted \\
        --rename regressor.=head.layers. --drop esm.
    hf-ext resume --convert best_model.pth --model igt5_esm2_original_t4.yaml \\
        --output_dir converted --rename regressor.=head.layers. --drop igt5_model. esm2_model.
    hf-ext resume --merge outputs/affinity/checkpoint-400 --output_dir merged

Converting takes the names and sizes of the model from the config.json in --model, not its weights, or from a YAML file
of recipes/max_speed.py, and refuses an entry that it cannot place. Merging makes a model folder for from_pretrained of
a checkpoint that several processes wrote in pieces (FSDP2). Files are read as tensors and numbers only: nothing in them
is run. Exit status: 0 if a run would continue, or the file was converted or merged; 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_ext.quick_imports import quick_imports

with quick_imports():
    from hf_ext.affinity.untrained_folder import write_untrained_folder
    from hf_ext.checkpoints.tools.inspection import inspect_folder
    from hf_ext.checkpoints.tools.inspection_report import format_inspection, inspection_json
    from hf_ext.checkpoints.tools.merging import merge_checkpoint
    from hf_ext.checkpoints.tools.migration import ConversionSettings, convert, describe_conversion
    from hf_ext.errors import ArgumentError, exit_on_errors
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.run_log import start_run_log


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe; returns the exit status."""
    args = parse_arguments(argv)
    refuse_several("resume_check")
    log = start_run_log(None)
    if args.convert is not None:
        settings = ConversionSettings(args.rename, args.drop, args.weights_key, tuple(args.label_scale))
        with model_folder(args.model) as model:
            result = convert(args.convert, model, args.output_dir, settings)
        log.info(describe_conversion(result, args.output_dir))
        continues = True
    elif args.merge is not None:
        result, continues = merge_checkpoint(args.merge, args.output_dir), True
        size = sum(result["files"].values())
        log.info("%s: %d tensors of step %d, %d bytes.", args.output_dir, result["num_tensors"], result["step"], size)
    else:
        inspection = inspect_folder(args.folder)
        log.info(format_inspection(inspection, args.arguments))
        result, continues = inspection_json(inspection), inspection.continues_from is not None
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if continues else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ArgumentError: flags of both uses, or of neither.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    look = parser.add_argument_group("looking")
    look.add_argument("folder", nargs="?", help="Output folder or one checkpoint to look at.")
    look.add_argument("--json", type=Path, help="File to write the same into, as JSON.")
    look.add_argument("--arguments", action="store_true", help="Also list what is recorded of the run.")
    make = parser.add_argument_group("converting and merging")
    make.add_argument("--convert", type=Path, metavar="OLD.pth", help="File that torch.save wrote, to convert.")
    make.add_argument("--merge", type=Path, metavar="CHECKPOINT", help="Checkpoint in pieces, to make whole.")
    make.add_argument(
        "--model",
        type=Path,
        help="Folder with the config.json of the model it is for, or YAML file of recipes/max_speed.py.",
    )
    make.add_argument("--output_dir", type=Path, help="New folder for the converted or merged model.")
    make.add_argument("--rename", nargs="+", type=as_pair, default=[], metavar="OLD=NEW", help="Prefixes of names.")
    make.add_argument("--drop", nargs="+", default=[], metavar="PREFIX", help="Entries to leave out, as renamed.")
    make.add_argument("--weights_key", help="Entry of the file that holds the weights, where that is not clear.")
    make.add_argument(
        "--label_scale",
        nargs=2,
        type=float,
        default=[0.0, 1.0],
        metavar=("MEAN", "STD"),
        help="By which the old script standardised labels, if it did (affinity models).",
    )
    args = parser.parse_args(argv)
    if sum(use is not None for use in (args.folder, args.convert, args.merge)) != 1:
        raise ArgumentError(
            "Give a FOLDER to look at, or --convert OLD.pth --model FOLDER --output_dir NEW, or --merge CHECKPOINT "
            "--output_dir NEW."
        )
    if args.merge is not None and args.output_dir is None:
        raise ArgumentError("--merge needs --output_dir, a new folder.")
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
        write_untrained_folder(given, Path(scratch))
        yield Path(scratch)


def as_pair(text: str) -> tuple[str, str]:
    """ "old.=new." as its two sides."""
    old, sign, new = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': give OLD=NEW")
    return old, new


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
