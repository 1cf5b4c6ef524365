"""Sample antibodies from a trained generator: a folder or Hub id, and antigens; writes a ranked CSV and a FASTA.

    hf-ext sample --model outputs/generator --dataset_name antigens.fasta --num_samples 100

Each line of the CSV is a distinct antibody of an antigen: the columns of its input row, `source_row` (the row's line),
`rank` within the antigen, both chains, `copies` (how often it was drawn), `log_probability` (mean per token, of the
model at temperature 1), `valid`, `problem` and `checked_by`. What is malformed or not valid is marked, ranked last, and
never left out. Valid ones are ranked by log-probability; with a --discriminator whose own record says that it beat
every baseline, by what it predicts. The FASTA beside it holds the same chains.

A seed gives the same antibodies, whatever the batch and whichever other antigens are asked for. Nothing here was
tested in a laboratory: an output is a sequence to examine, not a binder and not a therapeutic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..affinity.prediction_file import find_rejected, refuse_added
from ..arguments.checks import FINITE, check_choices, check_ranges
from ..arguments.parser import parse_command
from ..data.arguments import DataArguments, ReadingArguments
from ..data.collators import SequenceCollator
from ..data.loading import load_sequences
from ..data.reading import SOURCE_ROW, peek_columns
from ..data.tokenization import ResidueTokenizer, check_inputs
from ..errors import ArgumentError, DataError
from ..models.families import limit_of_positions
from ..processes import refuse_several
from ..reporting.progress import start_run_log
from .arguments import WritingArguments, flag
from .generator import LoadedGenerator, load_generator
from .judging.discriminator import ANTIGENS_UNKNOWN, Discriminator, find_doubts
from .judging.numbering import Numberer
from .judging.rows import AntibodyRows
from .sample_table import (
    ADDED,
    ANTIGEN,
    Examiners,
    describe,
    find_outputs,
    name_antigens,
    tabulate,
    write_fasta,
    write_table,
)
from .sampling import MAX_TOKENS, RANGES, TEMPERATURE, TOKENS_PER_BATCH, Decoding, sample_pairs

NUM_SAMPLES = 10
KNOWN_ANTIGENS = (ANTIGEN, "antigen_sequence", "sequence")  # columns that are looked for, in this order


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
        *("num_samples", "affinity", "temperature", "top_p", "greedy", "seed", "max_tokens_per_batch", "needs_light"),
        *("numbering", "training_data", "training_columns", "discriminator"),
    )

    model: str = field(metadata={"help": "Folder that hf-ext generate wrote, or Hub id."})
    revision: str | None = flag(None, "Commit, tag or branch of a Hub model.")
    antigen: str | None = flag(None, "One antigen's sequence, in place of --dataset_name.")
    antigen_column: str | None = flag(
        None, f"Column with the antigen's sequence. Left out: the first of {', '.join(KNOWN_ANTIGENS)}."
    )
    output: str = flag("antibodies.csv", "CSV to write; a FASTA of that name is written beside it.")
    keep_columns: bool = flag(True, "Write all columns of the input too, as read.")
    num_samples: int | None = flag(None, f"Antibodies per antigen. Left out: {NUM_SAMPLES}; 1 with --greedy.")
    affinity: float | None = flag(None, "Affinity to ask for, in the unit of training (pKd). Left out: unknown.")
    greedy: bool = flag(False, "The likeliest token each time: one antibody per antigen.")
    seed: int = flag(0, "The same seed gives the same antibodies, in batches of any size.")
    max_new_tokens: int = flag(MAX_TOKENS, "Tokens of a pair; longer ones are cut off and marked.")
    max_tokens_per_batch: int = flag(TOKENS_PER_BATCH, "Tokens that are written together; less needs less memory.")
    needs_light: bool = flag(True, "false: a heavy chain alone is a valid output.")
    training_data: str | None = flag(None, "File that the model was trained on: the nearest antibody there is named.")
    training_columns: list[str] = field(
        default_factory=lambda: ["heavy", "light"],
        metadata={"help": "Its columns of heavy and light chains, or of heavy chains alone."},
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, {**RANGES, "affinity": FINITE})
        if not 1 <= len(self.training_columns) <= 2:
            raise ArgumentError(f"training_columns={self.training_columns}: name heavy and light, or heavy alone.")
        if self.greedy and (self.temperature != TEMPERATURE or self.top_k or self.top_p):
            raise ArgumentError("--temperature, --top_k and --top_p are for what is drawn; --greedy draws nothing.")

    @property
    def decoding(self) -> Decoding:
        """As `sample_pairs` is told; raises `ArgumentError` where settings contradict each other."""
        given = {name: getattr(self, name) for name in (*RANGES, "greedy")}
        if self.num_samples is None:
            given["num_samples"] = 1 if self.greedy else NUM_SAMPLES
        return Decoding(**given)


def main(argv: list[str] | None = None) -> tuple[Path, Path]:
    """Runs the command; returns the paths of the CSV and of the FASTA."""
    _, (args, reading) = parse_command((SampleArguments, ReadingArguments), {}, __doc__, argv)
    refuse_several("sample")
    data_args = DataArguments(**vars(reading))
    _check_arguments(args, data_args)
    log = start_run_log(None)
    output, fasta = find_outputs(args.output, data_args.dataset_name)
    antigen_column = _settle_columns(args, data_args)
    rows, as_read = _read_antigens(args, data_args, output, antigen_column)
    generator = load_generator(args.model, revision=args.revision)
    _check_generator(generator, rows, antigen_column, args, data_args)
    examiners = _find_examiners(args)  # before any time is spent on sampling

    antigens: list[str] = rows[antigen_column][:]
    settings = {**vars(args.decoding), "affinity": args.affinity}
    found = sample_pairs(generator.model, generator.tokenizer, antigens, **settings)
    if examiners.discriminator is not None:
        for doubt in find_doubts(examiners.discriminator.record):
            log.warning("The discriminator: %s.", doubt.rstrip("."))
        log.warning(ANTIGENS_UNKNOWN)
    table = tabulate(found, antigens, examiners, args.affinity)
    write_table(output, _kept_columns(rows, as_read), table)
    ids = rows[data_args.id_column][:] if data_args.id_column else None
    num_left_out = write_fasta(fasta, name_antigens(ids, rows[SOURCE_ROW][:]), table)
    for line in describe(table, antigens):
        level = logging.WARNING if line.startswith("WARNING") else logging.INFO
        log.log(level, line.removeprefix("WARNING: "))
    if num_left_out:
        log.warning("%d outputs without any residue are in the CSV alone.", num_left_out)
    how = "predicted affinity" if examiners.orders_by_affinity else "log-probability"
    log.info("Ranked by %s, valid ones first, in %s and %s", how, output, fasta)
    return output, fasta


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
    if args.keep_columns:
        for path, names in files.items():
            refuse_added(str(path), names, ADDED, "antibodies")
    if empty := [path for path, names in files.items() if not names]:
        raise DataError(f"{empty[0]}: there is nothing in it.")
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


def _read_antigens(args: SampleArguments, data_args: DataArguments, output: Path, antigen_column: str) -> Any:
    """The cleaned antigens with ids and `source_row`, and the rows as read; None where these are not kept."""
    loaded = load_sequences(
        data_args,
        output_dir=output.parent,
        rejected_name=find_rejected(output, data_args.bad_rows).name,
        keeps_columns=args.keep_columns,
        table=None if args.antigen is None else Dataset.from_dict({antigen_column: [args.antigen]}),
    )
    if loaded.as_read is not None:  # of the Hub, known now
        refuse_added(str(data_args.dataset_name), loaded.as_read.column_names, ADDED, "antibodies")
    return loaded.table, loaded.as_read


def _check_generator(
    generator: LoadedGenerator, rows: Any, antigen_column: str, args: SampleArguments, data_args: DataArguments
) -> None:
    """Refuses what the model cannot have learned, and antigens that its encoder cannot take."""
    if args.affinity is not None and not generator.knows_affinity:
        raise ArgumentError(f"--affinity {args.affinity:g}: this model was trained without affinities; leave it out.")
    if generator.tokenizer is not None:
        limit = limit_of_positions(generator.model.encoder.spec.config)
        tokenizers = {antigen_column: ResidueTokenizer(generator.tokenizer, 1, limit)}
        collator = SequenceCollator(tokenizers, {antigen_column: [antigen_column]})
        check_inputs(collator, {"antigens": rows}, data_args.dataset_name)


def _find_examiners(args: SampleArguments) -> Examiners:
    """What outputs are examined by, read and loaded."""
    found: dict[str, Any] = {"numberer": Numberer.of(args.numbering), "needs_light": args.needs_light}
    if args.training_data is not None:
        heavy, *light = args.training_columns
        given = DataArguments(dataset_name=args.training_data, sequence_columns=[heavy, *light], missing_chains=light)
        known: Any = load_sequences(given).table
        chains = known[light[0]][:] if light else [None] * len(known)
        found["training"] = AntibodyRows.of_columns(known[heavy][:], chains, [""] * len(known))
        found["training_rows"] = known[SOURCE_ROW][:]
    if args.discriminator is not None:
        found["discriminator"] = Discriminator.from_pretrained(args.discriminator)
    return Examiners(**found)


def _kept_columns(rows: Any, as_read: Any) -> Mapping[str, Sequence[Any]]:
    source = rows if as_read is None else as_read
    names = [name for name in source.column_names if name != SOURCE_ROW]
    return {**{name: source[name][:] for name in names}, SOURCE_ROW: rows[SOURCE_ROW][:]}
