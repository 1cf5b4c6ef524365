"""Sample antibodies from a trained generator: a folder or Hub id, and antigens; writes a ranked CSV and a FASTA.

    hf-ext sample --model outputs/generator --dataset_name antigens.fasta --num_samples 100

    hf-ext sample --model USER/NAME --antigen MKTAYIAKQRQISFVKSH --temperature 0.8 --output new.csv

Each line of the CSV is a distinct antibody of an antigen: the columns of its input row, `source_row` (the row's line),
`rank` within the antigen, both chains, `copies` (how often it was drawn), `log_probability` (mean per token, of the
model at temperature 1), `valid`, `problem` and `checked_by`. What is malformed or not valid is marked, ranked last, and
never left out. Valid ones are ranked by log-probability; with a --discriminator whose own record says that it beat
every baseline, by what it predicts. The FASTA beside it holds the same chains.

A seed gives the same antibodies, whatever the batch and whichever other antigens are asked for. Nothing here was
tested in a laboratory: an output is a sequence to examine, not a binder and not a therapeutic.
"""

from __future__ import annotations

from hf_ext.cli import quick_imports

with quick_imports():
    import logging
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from datasets import Dataset

    from hf_ext.affinity.prediction_file import find_rejected, refuse_added
    from hf_ext.arguments.parser import parse_command
    from hf_ext.data.arguments import DataArguments
    from hf_ext.data.collators import SequenceCollator
    from hf_ext.data.loading import load_sequences
    from hf_ext.data.reading import SOURCE_ROW, peek_columns
    from hf_ext.data.tokenization import ResidueTokenizer
    from hf_ext.errors import ArgumentError, DataError, exit_on_errors
    from hf_ext.generation.generator import LoadedGenerator, load_generator
    from hf_ext.generation.judging.discriminator import ANTIGENS_UNKNOWN, Discriminator, find_doubts
    from hf_ext.generation.judging.numbering import Numberer
    from hf_ext.generation.judging.rows import AntibodyRows
    from hf_ext.generation.sample import (
        ADDED,
        ANTIGEN,
        KNOWN_ANTIGENS,
        Examiners,
        SampleArguments,
        describe,
        find_outputs,
        name_antigens,
        tabulate,
        write_fasta,
        write_table,
    )
    from hf_ext.generation.sampling import sample_pairs
    from hf_ext.models.families import limit_of_positions
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.running import check_inputs


def main(argv: list[str] | None = None) -> tuple[Path, Path]:
    """Runs the recipe; returns the paths of the CSV and of the FASTA."""
    parser, (args, data_args) = parse_command((SampleArguments, DataArguments), {}, __doc__, argv)
    refuse_several("sample")
    _check_arguments(args, data_args, parser.explicit)
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


def _check_arguments(args: SampleArguments, data_args: DataArguments, explicit: frozenset[str]) -> None:
    """Refuses arguments of the data that antigens do not have, and those of files beside a sequence."""
    if (args.antigen is None) == (data_args.dataset_name is None):
        raise ArgumentError("Name the antigens: either --dataset_name FILE, or --antigen SEQUENCE.")
    if args.antigen is not None and (args.antigen_column or data_args.id_column or data_args.filter):
        raise ArgumentError("--antigen is a sequence: --antigen_column, --id_column and --filter are for files.")
    if unused := sorted(explicit & {"sequence_columns", "missing_chains", "label_column", "split", "streaming"}):
        raise ArgumentError(f"--{unused[0]}: not of antigens, which --antigen_column names; leave it out.")


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


if __name__ == "__main__":
    with exit_on_errors():
        main()
