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
    from hf_ext.data.arguments import DataArguments
    from hf_ext.data.collators import SequenceCollator
    from hf_ext.data.loading import load_sequences
    from hf_ext.data.reading import SOURCE_ROW, peek_columns
    from hf_ext.data.tokenization import ResidueTokenizer
    from hf_ext.errors import ArgumentError, DataError, exit_on_errors
    from hf_ext.generation.candidates import (
        Scores,
        as_rows,
        collect,
        describe,
        rank,
        score_candidates,
        tabulate,
    )
    from hf_ext.generation.generator import LoadedGenerator, load_generator
    from hf_ext.generation.judging.discriminator import ANTIGENS_UNKNOWN, Discriminator, find_doubts
    from hf_ext.generation.judging.numbering import Numberer
    from hf_ext.generation.judging.rows import AntibodyRows
    from hf_ext.generation.sample_arguments import ANTIGEN, KNOWN_ANTIGENS, SampleArguments
    from hf_ext.generation.sample_files import ADDED, find_outputs, name_antigens, write_fasta, write_table
    from hf_ext.generation.sampling import sample_pairs
    from hf_ext.models.families import limit_of_positions
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.running import check_inputs, parse_command


def main(argv: list[str] | None = None) -> tuple[Path, Path]:
    """Runs the recipe; returns the paths of the CSV and of the FASTA."""
    _, (args,) = parse_command((SampleArguments,), {}, __doc__, argv)
    refuse_several("sample")
    log = start_run_log(None)
    output, fasta = find_outputs(args.output, args.dataset_name)
    antigen_column, id_column = _find_columns(args)
    rows, as_read = _read_antigens(args, output, antigen_column, id_column)
    generator = load_generator(args.model, revision=args.revision)
    _check_generator(generator, rows, antigen_column, args)
    judges = _find_judges(args)  # before any time is spent on sampling

    antigens: list[str] = rows[antigen_column][:]
    settings = vars(args.decoding)
    candidates = collect(
        sample_pairs(generator.model, generator.tokenizer, antigens, affinity=args.affinity, **settings)
    )
    scores = score_candidates(as_rows(candidates, antigens), needs_light=args.needs_light, **judges)
    by_affinity = _tell_discriminator(judges.get("discriminator"), log)
    order = rank(candidates, scores, by_affinity)
    table = tabulate(candidates, scores, order, args.affinity)
    requests = [candidates[i].request for i in order]
    write_table(output, _kept_columns(rows, as_read), requests, table)
    names = name_antigens(rows[id_column][:] if id_column else None, rows[SOURCE_ROW][:])
    num_left_out = write_fasta(fasta, names, requests, table)
    _report(candidates, scores, antigens, num_left_out, log)
    log.info("Ranked by %s, valid ones first, in %s and %s", _order(by_affinity), output, fasta)
    return output, fasta


def _find_columns(args: SampleArguments) -> tuple[str, str | None]:
    """The columns of antigens and of ids, as far as files here can be asked before they are read."""
    if args.antigen is not None:
        return ANTIGEN, None
    files = peek_columns(args.dataset_name)
    if args.keep_columns:
        for path, names in files.items():
            refuse_added(str(path), names, ADDED, "antibodies")
    common = set.intersection(*map(set, files.values())) if files else set()
    antigen = args.antigen_column or next((name for name in KNOWN_ANTIGENS if name in common), None)
    if empty := [path for path, names in files.items() if not names]:
        raise DataError(f"{empty[0]}: there is nothing in it.")
    if antigen is None and files:
        raise ArgumentError(
            f"--dataset_name {args.dataset_name}: no column {', '.join(KNOWN_ANTIGENS)} among "
            f"{', '.join(sorted(common)[:30])}. Name the antigens' with --antigen_column."
        )
    return antigen or ANTIGEN, args.id_column or ("id" if "id" in common else None)


def _read_antigens(args: SampleArguments, output: Path, antigen_column: str, id_column: str | None) -> tuple[Any, Any]:
    """The cleaned antigens with ids and `source_row`, and the rows as read; None where these are not kept."""
    loaded = load_sequences(
        args.data_arguments(antigen_column, id_column),
        output_dir=output.parent,
        rejected_name=find_rejected(output, args.bad_rows).name,
        keeps_columns=args.keep_columns,
        table=None if args.antigen is None else Dataset.from_dict({antigen_column: [args.antigen]}),
    )
    if loaded.as_read is not None:
        refuse_added(str(args.dataset_name), loaded.as_read.column_names, ADDED, "antibodies")  # of the Hub, known now
    return loaded.table, loaded.as_read


def _check_generator(generator: LoadedGenerator, rows: Any, antigen_column: str, args: SampleArguments) -> None:
    """Refuses what the model cannot have learned, and antigens that its encoder cannot take."""
    if args.affinity is not None and not generator.knows_affinity:
        raise ArgumentError(f"--affinity {args.affinity:g}: this model was trained without affinities; leave it out.")
    if generator.tokenizer is not None:
        limit = limit_of_positions(generator.model.encoder.spec.config)
        tokenizers = {antigen_column: ResidueTokenizer(generator.tokenizer, 1, limit)}
        collator = SequenceCollator(tokenizers, {antigen_column: [antigen_column]})
        check_inputs(collator, {"antigens": rows}, args.dataset_name)


def _find_judges(args: SampleArguments) -> dict[str, Any]:
    """What `score_candidates` is given."""
    judges: dict[str, Any] = {"numberer": Numberer.of(args.numbering)}
    if args.training_data is not None:
        heavy, *light = args.training_columns
        given = DataArguments(
            dataset_name=args.training_data, sequence_columns=[heavy, *light], missing_chains=light, bad_rows="error"
        )
        known: Any = load_sequences(given).table
        chains = known[light[0]][:] if light else [None] * len(known)
        judges["training"] = AntibodyRows.of_columns(known[heavy][:], chains, [""] * len(known))
        judges["training_rows"] = known[SOURCE_ROW][:]
    if args.discriminator is not None:
        judges["discriminator"] = Discriminator.from_pretrained(args.discriminator)
    return judges


def _tell_discriminator(discriminator: Discriminator | None, log: logging.Logger) -> bool:
    """Says what speaks against its numbers; returns whether they may order anything."""
    if discriminator is None:
        return False
    doubts = find_doubts(discriminator.record)
    for doubt in doubts:
        log.warning("The discriminator: %s.", doubt.rstrip("."))
    log.warning(ANTIGENS_UNKNOWN)
    return not doubts


def _kept_columns(rows: Any, as_read: Any) -> Mapping[str, Sequence[Any]]:
    source = rows if as_read is None else as_read
    names = [name for name in source.column_names if name != SOURCE_ROW]
    return {**{name: source[name][:] for name in names}, SOURCE_ROW: rows[SOURCE_ROW][:]}


def _report(candidates: Any, scores: Scores, antigens: Sequence[str], num_left_out: int, log: logging.Logger) -> None:
    for line in describe(candidates, scores, antigens):
        level = logging.WARNING if line.startswith("WARNING") else logging.INFO
        log.log(level, line.removeprefix("WARNING: ") if level == logging.WARNING else line)
    if num_left_out:
        log.warning("%d outputs without any residue are in the CSV alone.", num_left_out)


def _order(by_affinity: bool) -> str:
    return "predicted affinity" if by_affinity else "log-probability"


if __name__ == "__main__":
    with exit_on_errors():
        main()
