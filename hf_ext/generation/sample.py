"""Sample antibodies from a trained generator: a folder or Hub id, and antigens; writes a ranked CSV and a FASTA.

    hf-ext sample --model outputs/generator --dataset_name antigens.fasta --num_samples 100

Each line of the CSV is a distinct antibody of an antigen: the columns of its input row, `source_row` (the row's line),
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..affinity.prediction_file import find_output, find_rejected, refuse_added
from ..arguments.checks import FINITE, check_choices, check_ranges
from ..arguments.parser import parse_command
from ..data.arguments import DataArguments, ReadingArguments
from ..data.collators import SequenceCollator
from ..data.loading import load_sequences
from ..data.reading import SOURCE_ROW, peek_columns
from ..data.tokenization import ResidueTokenizer
from ..errors import ArgumentError, DataError
from ..models.families import limit_of_positions
from ..models.generation.configuration import GeneratorConfig
from ..processes import refuse_several
from ..reporting.run_log import start_run_log
from ..tasks.running import check_inputs
from .arguments import WritingArguments, flag
from .discriminator import Discriminator
from .rows import AntibodyRows
from .sample_table import COLUMNS, MORE_COLUMNS, describe_table, tabulate, write_csv, write_fasta
from .sampling import MAX_TOKENS, RANGES, TOKENS_PER_BATCH, load_generator, sample_pairs

ANTIGEN = "antigen"
KNOWN_ANTIGENS = (ANTIGEN, "antigen_sequence", "sequence")  # columns that are looked for, in this order
ADDED = (SOURCE_ROW, *COLUMNS, *MORE_COLUMNS)  # what is written beside the input's own columns
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

    model: str = field(metadata={"help": "Folder that hf-ext generate wrote, or Hub id."})
    revision: str | None = flag(None, "Commit, tag or branch of a Hub model.")
    antigen: str | None = flag(None, "One antigen's sequence, in place of --dataset_name.")
    antigen_column: str | None = flag(
        None, f"Column with the antigen's sequence. Left out: the first of {', '.join(KNOWN_ANTIGENS)}."
    )
    output: str = flag("antibodies.csv", "CSV to write; a FASTA of that name is written beside it.")
    keep_columns: bool = flag(True, "Write all columns of the input too, as read.")
    num_samples: int = flag(10, "Antibodies per antigen.")
    affinity: float | None = flag(None, "Affinity to ask for, in the unit of training (pKd). Left out: unknown.")
    seed: int = flag(0, "The same seed gives the same antibodies, in batches of any size.")
    max_new_tokens: int = flag(MAX_TOKENS, "Tokens of a pair; longer ones are cut off and marked.")
    max_tokens_per_batch: int = flag(TOKENS_PER_BATCH, "Tokens that are written together; less needs less memory.")
    training_data: str | None = flag(None, "File that the model was trained on: copies of it are marked.")
    training_columns: list[str] = field(
        default_factory=lambda: ["heavy", "light"],
        metadata={"help": "Its columns of heavy and light chains, or of heavy chains alone."},
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, {**RANGES, "affinity": FINITE})
        if not 1 <= len(self.training_columns) <= 2:
            raise ArgumentError(f"training_columns={self.training_columns}: name heavy and light, or heavy alone.")


def main(argv: list[str] | None = None) -> tuple[Path, Path]:
    """Runs the command; returns the paths of the CSV and of the FASTA."""
    _, (args, reading) = parse_command((SampleArguments, ReadingArguments), {}, __doc__, argv)
    refuse_several("sample")
    data_args = DataArguments(**vars(reading))
    _check_arguments(args, data_args)
    log = start_run_log(None)
    output, fasta = find_outputs(args.output, data_args.dataset_name)
    antigen_column = _settle_columns(args, data_args)
    loaded = load_sequences(
        data_args,
        output_dir=output.parent,
        rejected_name=find_rejected(output, data_args.bad_rows).name,
        keeps_columns=args.keep_columns,
        table=None if args.antigen is None else Dataset.from_dict({antigen_column: [args.antigen]}),
    )
    rows: Any = loaded.table
    as_read = rows if loaded.as_read is None else loaded.as_read
    if loaded.as_read is not None:  # of the Hub, known now
        refuse_added(str(data_args.dataset_name), as_read.column_names, ADDED, "antibodies")
    model, tokenizer = load_generator(args.model, revision=args.revision)
    _check_generator(model, tokenizer, rows, antigen_column, args, data_args)
    # Before any time is spent on sampling.
    discriminator = None if args.discriminator is None else Discriminator.from_pretrained(args.discriminator)
    training = None if args.training_data is None else _read_training(args.training_data, args.training_columns)

    antigens: list[str] = rows[antigen_column][:]
    settings = {name: getattr(args, name) for name in RANGES}
    found = sample_pairs(model, tokenizer, antigens, affinity=args.affinity, **settings)
    table = tabulate(
        found,
        antigens,
        needs_light=model.config.needs_light,
        asked=args.affinity,
        training=training,
        discriminator=discriminator,
    )
    kept = {name: as_read[name][:] for name in as_read.column_names if name != SOURCE_ROW}
    kept[SOURCE_ROW] = rows[SOURCE_ROW][:]
    of_antigens = {name: [cells[i] for i in table["request"]] for name, cells in kept.items()}
    write_csv(output, {**of_antigens, **table.drop(columns="request")})
    write_fasta(fasta, _name_antigens(rows, data_args.id_column), table)
    text, warnings = describe_table(table, antigens)
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
    """The CSV and, under the same name, the FASTA to write, found fit for that; their folder is made.

    Raises:
        ArgumentError: as `find_output`, of either; or both have one name.
        DataError, FolderError: as `find_output`.
    """
    start = [SOURCE_ROW, *COLUMNS]

    def has_start(header: list[str]) -> bool:
        return any(header[i : i + len(start)] == start for i in range(len(header)))

    def is_title(header: list[str]) -> bool:
        return " log_probability=" in ",".join(header)

    table = find_output(name, dataset_name, has_start, WRITER)
    fasta = table.with_suffix(".fasta")
    if fasta == table:
        raise ArgumentError(
            f"--output {name!r} ends in .fasta, which is what the FASTA beside it is called. Name another CSV to write."
        )
    return table, find_output(str(fasta), dataset_name, is_title, WRITER)


def _check_arguments(args: SampleArguments, data_args: DataArguments) -> None:
    """Refuses a stream of antigens, and arguments of files beside a sequence."""
    if (args.antigen is None) == (data_args.dataset_name is None):
        raise ArgumentError("Name the antigens: either --dataset_name FILE, or --antigen SEQUENCE.")
    if args.antigen is not None and (args.antigen_column or data_args.id_column or data_args.filter):
        raise ArgumentError("--antigen is a sequence: --antigen_column, --id_column and --filter are for files.")
    if data_args.streaming:
        raise ArgumentError("--streaming: antigens are read whole; leave it out.")


def _settle_columns(args: SampleArguments, data_args: DataArguments) -> str:
    """Makes `data_args` name the columns of antigens and ids, as far as files can be asked before they are read.

    Returns:
        That of antigens.
    """
    files = peek_columns(data_args.dataset_name) if args.antigen is None else {}
    for path, names in files.items():
        if not names:
            raise DataError(f"{path}: there is nothing in it.")
        if args.keep_columns:
            refuse_added(path, names, ADDED, "antibodies")
    common = set.intersection(*map(set, files.values())) if files else set()
    antigen = args.antigen_column or next((name for name in KNOWN_ANTIGENS if name in common), None)
    if antigen is None and files:
        raise ArgumentError(
            f"--dataset_name {data_args.dataset_name}: no column {', '.join(KNOWN_ANTIGENS)} among "
            f"{', '.join(sorted(common)[:30])}. Name the antigens' with --antigen_column."
        )
    data_args.sequence_columns = [antigen or ANTIGEN]
    data_args.id_column = data_args.id_column or ("id" if "id" in common else None)
    data_args.__post_init__()  # its own checks, of these columns
    return antigen or ANTIGEN


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
    """The antibodies in a file, in its columns of heavy and light chains or of heavy chains alone."""
    heavy, *light = columns
    known: Any = load_sequences(
        DataArguments(dataset_name=name, sequence_columns=[*columns], missing_chains=light)
    ).table
    chains = known[light[0]][:] if light else [None] * len(known)
    return AntibodyRows.of_columns(known[heavy][:], chains, [""] * len(known))


def _name_antigens(rows: Any, id_column: str | None) -> list[str]:
    """A name of one word for each antigen in a FASTA: its id, with its row where ids are missing or repeat."""
    numbers = rows[SOURCE_ROW][:]
    words = ["_".join(str(one or "").split()) for one in (rows[id_column][:] if id_column else [None] * len(numbers))]
    return [
        word if word and words.count(word) == 1 else f"{word}_row{number}".lstrip("_")
        for word, number in zip(words, numbers)
    ]
