"""Sample antibodies from a trained generator: a folder or Hub id, and antigens; writes a ranked CSV and a FASTA.

    hf-ext sample --model outputs/generator --dataset_name antigens.fasta --num_samples 100

Each line of the CSV is a distinct antibody of an antigen: `id`, `antigen` and `source_row` (its line) of the input,
`rank` within the antigen, both chains, `copies` (how often it was drawn), `log_probability` (mean per token, of the
model at temperature 1), `valid` (by the pattern of conserved residues), `problem` and `cdr_h3`. What is malformed or
not valid is marked, ranked last, and never left out. Valid ones are ranked by log-probability; with a --discriminator
whose own record says that it beat every baseline, by what it predicts. With --training_data each has its identity to
the nearest heavy chain there; 0.7 stands for less, too. The FASTA beside it holds the same chains.

A seed gives the same antibodies, whatever the batch and whichever other antigens are asked for. Nothing here was
tested in a laboratory: an output is a sequence to examine, not a binder and not a therapeutic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset

from ..arguments import FINITE, check_choices, check_ranges, option, parse_command
from ..data import (
    SOURCE_ROW,
    DataArguments,
    ReadingArguments,
    ResidueTokenizer,
    SequenceCollator,
    check_inputs,
    load_sequences,
    peek_columns,
)
from ..errors import ArgumentError
from ..files import write_csv
from ..models import GeneratorConfig, limit_of_positions
from ..processes import refuse_several
from ..property import find_output, find_rejected
from ..text import start_run_log
from .arguments import WritingArguments
from .judging.discriminator import Discriminator
from .rows import AntibodyRows
from .sample_table import COLUMNS, describe_table, name_antigens, tabulate, write_fasta
from .sampling import MAX_TOKENS, RANGES, TOKENS_PER_BATCH, load_generator, sample_pairs

WRITER = "hf-ext sample"


@dataclass(kw_only=True)
class SampleArguments(WritingArguments):
    """Which model, for which antigens, how tokens are chosen, what is said about the outputs.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "sampling"  # in --help
    _only_reads = "sample"
    _first_flags = (
        *("model", "revision", "antigen", "dataset_name", "antigen_column", "id_column", "bad_rows", "output"),
        *("num_samples", "affinity", "temperature", "top_p", "seed", "max_tokens_per_batch"),
        *("training_data", "training_columns", "discriminator"),
    )

    model: str = option(MISSING, "Folder that hf-ext generate wrote, or Hub id.")
    revision: str | None = option(None, "Commit, tag or branch of a Hub model.")
    antigen: str | None = option(None, "One antigen's sequence, in place of --dataset_name.")
    antigen_column: str | None = option(
        None, "Column with the antigen's sequence. Left out: antigen; of a FASTA sequence."
    )
    output: str = option("antibodies.csv", "CSV to write; a FASTA of that name is written beside it.")
    num_samples: int = option(10, "Antibodies per antigen.")
    affinity: float | None = option(None, "Affinity to ask for, in the unit of training (pKd). Left out: unknown.")
    seed: int = option(0, "The same seed gives the same antibodies, in batches of any size.")
    max_new_tokens: int = option(MAX_TOKENS, "Tokens of a pair; longer ones are cut off and marked.")
    max_tokens_per_batch: int = option(TOKENS_PER_BATCH, "Tokens that are written together; less needs less memory.")
    training_data: str | None = option(None, "File that the model was trained on: copies of it are marked.")
    training_columns: list[str] = option(
        ["heavy", "light"], "Its columns of heavy and light chains, or of heavy chains alone."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, {**RANGES, "affinity": FINITE})
        if not 1 <= len(self.training_columns) <= 2:
            raise ArgumentError(f"training_columns={self.training_columns}: name heavy and light, or heavy alone.")


def main(argv: list[str] | None = None) -> tuple[Path, Path]:
    """Runs the command; returns the paths of the CSV and of the FASTA."""
    _, (args, reading) = parse_command((SampleArguments, ReadingArguments), {"too_long": "error"}, __doc__, argv)
    refuse_several("sample")
    data_args = DataArguments(**vars(reading))
    if (args.antigen is None) == (data_args.dataset_name is None):
        raise ArgumentError("Name the antigens: either --dataset_name FILE, or --antigen SEQUENCE.")
    if args.antigen is not None and (args.antigen_column or data_args.id_column):
        raise ArgumentError("--antigen is a sequence: --antigen_column and --id_column are for files.")
    if data_args.streaming:
        raise ArgumentError("--streaming: antigens are read whole; leave it out.")
    log = start_run_log(None)
    output, fasta = find_outputs(args.output, data_args.dataset_name)
    antigen_column = _resolve_columns(args, data_args)
    loaded: Any = load_sequences(
        data_args,
        rejected=find_rejected(output, data_args.bad_rows),
        table=None if args.antigen is None else Dataset.from_dict({antigen_column: [args.antigen]}),
    )
    rows = loaded.table
    for note in loaded.report["notes"]:
        log.info(note)
    model, tokenizer = load_generator(args.model, revision=args.revision)
    _check_generator(model, tokenizer, rows, antigen_column, args, data_args)
    # Before any time is spent on sampling.
    discriminator = None if args.discriminator is None else Discriminator.from_pretrained(args.discriminator)
    training = None if args.training_data is None else _read_training(args.training_data, args.training_columns)

    numbers = rows[SOURCE_ROW][:]
    ids = rows[data_args.id_column][:] if data_args.id_column else [""] * len(numbers)
    inputs = pd.DataFrame(dict(zip(COLUMNS, (ids, rows[antigen_column][:], numbers))))
    settings = {name: getattr(args, name) for name in RANGES}
    found = sample_pairs(model, tokenizer, inputs["antigen"].tolist(), affinity=args.affinity, **settings)
    table = tabulate(found, inputs, model.config.needs_light, args.affinity, training, discriminator)
    write_csv(output, table.drop(columns="request"))
    write_fasta(fasta, name_antigens(ids, numbers), table)
    text, warnings = describe_table(table)
    log.info(text)
    for warning in warnings:
        log.warning(warning)
    how = "log-probability"
    if discriminator is not None:
        if discriminator.doubt:
            log.warning("The discriminator: %s.", discriminator.doubt)
        else:
            how = "predicted affinity"
    log.info("Ranked by %s, valid ones first, in %s and %s", how, output, fasta)
    return output, fasta


def find_outputs(name: str, dataset_name: str | None) -> tuple[Path, Path]:
    """Finds the CSV and, under the same name, the FASTA to write, fit for that; makes their folder.

    Raises:
        ArgumentError: as `find_output`, of either; or both have one name.
        DataError, FolderError: as `find_output`.
    """
    table = find_output(name, dataset_name, lambda header: header[: len(COLUMNS)] == [*COLUMNS], WRITER)
    fasta = table.with_suffix(".fasta")
    if fasta == table:
        raise ArgumentError(
            f"--output {name!r} ends in .fasta, which is what the FASTA beside it is called. Name another CSV to write."
        )
    return table, find_output(str(fasta), dataset_name, lambda line: " log_probability=" in ",".join(line), WRITER)


def _resolve_columns(args: SampleArguments, data_args: DataArguments) -> str:
    """Makes `data_args` name the columns of antigens and ids; returns that of antigens."""
    names = {name for columns in peek_columns(data_args.dataset_name).values() for name in columns}
    default = "sequence" if "sequence" in names and "antigen" not in names else "antigen"
    antigen = args.antigen_column or default
    data_args.sequence_columns = [antigen]
    data_args.id_column = data_args.id_column or ("id" if "id" in names else None)
    data_args.__post_init__()  # its own checks, of these columns
    return antigen


def _check_generator(
    model: Any, tokenizer: Any, rows: Any, antigen_column: str, args: SampleArguments, data_args: DataArguments
) -> None:
    """Refuses what the model cannot have learned, and antigens that its encoder cannot take."""
    scale = (model.config.label_mean, model.config.label_std)
    if args.affinity is not None and scale == (GeneratorConfig.label_mean, GeneratorConfig.label_std):
        raise ArgumentError(f"--affinity {args.affinity:g}: this model was trained without affinities; leave it out.")
    if tokenizer is not None:
        limit = limit_of_positions(model.encoder.spec.config)
        tokenizers = {antigen_column: ResidueTokenizer(tokenizer, 1, limit)}
        collator = SequenceCollator(tokenizers, {antigen_column: [antigen_column]})
        check_inputs(collator, {"antigens": rows}, data_args.dataset_name)


def _read_training(name: str, columns: Sequence[str]) -> AntibodyRows:
    """Reads the antibodies in a file, in its columns of heavy and light chains or of heavy chains alone."""
    heavy, *light = columns
    known: Any = load_sequences(
        DataArguments(dataset_name=name, sequence_columns=[*columns], missing_chains=light)
    ).table
    chains = known[light[0]][:] if light else [None] * len(known)
    return AntibodyRows.of_columns(known[heavy][:], chains, [""] * len(known))
