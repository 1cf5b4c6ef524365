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

import numpy as np
import pandas as pd
from datasets import Dataset

from ..arguments import FINITE, check_choices, check_ranges, option, parse_command
from ..data import (
    SOURCE_ROW,
    AntibodyPair,
    DataArguments,
    ReadingArguments,
    ResidueTokenizer,
    SequenceCollator,
    check_inputs,
    load_sequences,
    peek_columns,
)
from ..errors import ArgumentError
from ..files import replacing, write_csv
from ..models import GeneratorConfig, limit_of_positions
from ..processes import refuse_several
from ..property import find_output, find_rejected
from ..text import start_run_log
from .arguments import WritingArguments
from .judging.copies import find_nearest
from .judging.discriminator import Discriminator
from .rows import AntibodyRows, find_cdr3, find_problems
from .sampling import MAX_TOKENS, RANGES, TOKENS_PER_BATCH, SampledPair, load_generator, sample_pairs

WRITER = "hf-ext sample"
COLLAPSED_BELOW = 0.5  # distinct by drawn
DIGITS = 4  # of a log-probability; further ones change with the batch
# Of each line; others follow if they were asked for.
COLUMNS = (
    *("id", "antigen", "source_row"),
    *("rank", "heavy", "light", "copies", "log_probability", "valid", "problem", "cdr_h3"),
)


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
    _check_arguments(args, data_args)
    log = start_run_log(None)
    output, fasta = find_outputs(args.output, data_args.dataset_name)
    antigen_column = _resolve_columns(args, data_args)
    rows: Any = load_sequences(
        data_args,
        rejected=find_rejected(output, data_args.bad_rows),
        table=None if args.antigen is None else Dataset.from_dict({antigen_column: [args.antigen]}),
    ).table
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
    write_fasta(fasta, _name_antigens(ids, numbers), table)
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

    def is_own(header: list[str]) -> bool:
        return header[: len(COLUMNS)] == [*COLUMNS]

    def is_title(header: list[str]) -> bool:
        return " log_probability=" in ",".join(header)

    table = find_output(name, dataset_name, is_own, WRITER)
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
    if args.antigen is not None and (args.antigen_column or data_args.id_column):
        raise ArgumentError("--antigen is a sequence: --antigen_column and --id_column are for files.")
    if data_args.streaming:
        raise ArgumentError("--streaming: antigens are read whole; leave it out.")


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


# --- table and FASTA ------------------------------------------------------------------------------------------------


def tabulate(
    found: Sequence[Sequence[SampledPair]],
    inputs: pd.DataFrame,
    needs_light: bool,
    asked: float | None,
    training: AntibodyRows | None,
    discriminator: Discriminator | None,
) -> pd.DataFrame:
    """Makes a line per distinct antibody of each antigen, malformed ones too; valid ones first, then the best.

    The best is the likeliest, or that of the highest predicted affinity by a discriminator without a doubt.

    Args:
        found: from `sample_pairs`.
        inputs: `id`, `antigen` and `source_row` of each antigen.
        needs_light: whether a heavy chain alone is a fault.
        asked: affinity that was asked for.
        training: antibodies that the model was trained on.
        discriminator: predicts affinities.

    Returns:
        `request`, the antigen's place; `COLUMNS`; `asked_affinity`, `predicted_affinity`, `nearest_heavy` and `is_copy`
        where these were asked for, NaN for what is not known. `rank` counts from 1 within each antigen.

    Cost: with training 0.1 s for 12,000 antibodies.
    """
    drawn: dict[tuple[int, AntibodyPair], list[float]] = {}
    for request, samples in enumerate(found):
        for one in samples:
            drawn.setdefault((request, one.pair), []).append(one.log_probability)
    table = inputs.iloc[[request for request, _ in drawn]].rename_axis("request").reset_index()
    rows = AntibodyRows.of_pairs([pair for _, pair in drawn], table["antigen"].tolist())
    problems = [problem or "" for problem in find_problems(rows, needs_light)]
    table["rank"] = 0
    table["heavy"] = rows.chain("heavy")
    table["light"] = rows.chain("light")
    table["copies"] = [len(known) for known in drawn.values()]
    table["log_probability"] = [round(max(known), DIGITS) for known in drawn.values()]
    table["valid"] = ["no" if problem else "yes" for problem in problems]
    table["problem"] = problems
    table["cdr_h3"] = [find_cdr3(chain) or "" for chain in rows.heavy]
    if asked is not None:
        table["asked_affinity"] = asked
    if discriminator is not None:
        table["predicted_affinity"] = discriminator.predict(rows)
    if training is not None:
        nearest = find_nearest(rows, training)
        table["nearest_heavy"] = nearest["nearest_heavy"]
        table["is_copy"] = np.where(nearest["is_copy"], "yes", "no")
    order = {"request": True, "valid": False, "log_probability": False}  # whether ascending
    if discriminator is not None and discriminator.doubt is None:
        order = {"request": True, "valid": False, "predicted_affinity": False, "log_probability": False}
    table = table.sort_values([*order], ascending=[*order.values()], ignore_index=True)
    table["rank"] = table.groupby("request").cumcount() + 1
    return table


def describe_table(table: pd.DataFrame) -> tuple[str, list[str]]:
    """Describes what was drawn, in a sentence; and what should make the reader suspicious."""
    copies = table["copies"]
    owner = table["antigen"]
    drawn = copies.sum()
    distinct = len(table)
    num_antigens = owner.nunique()
    text = (
        f"{drawn:,} antibodies for {num_antigens:,} antigens: {distinct:,} distinct, "
        f"{copies[table['valid'] == 'yes'].sum():,} with the pattern of conserved residues; all are in the table."
    )
    warnings = []
    if distinct < COLLAPSED_BELOW * drawn and drawn > num_antigens:
        warnings.append(f"{100 * distinct / drawn:.3g} % are distinct: the model, or its temperature, collapsed.")
    of_antibody = owner.groupby([table["heavy"], table["light"]])
    if shared := (of_antibody.nunique() > 1).sum():
        warnings.append(f"{shared:,} antibodies were written for several antigens: it may not read the antigen.")
    if "is_copy" in table and (copied := (table["is_copy"] == "yes").sum()):
        warnings.append(f"{copied:,} lines of the table are training antibodies to the residue.")
    return text, warnings


def write_fasta(path: Path, names: Sequence[str], table: pd.DataFrame) -> None:
    """Writes two records per antibody, `NAME_RANK_heavy` and `NAME_RANK_light`, with what is wrong in their titles.

    Chains without a residue have no record.

    Args:
        names: of the antigens.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for one in table.itertuples():
            title = f"log_probability={one.log_probability:.4f} copies={one.copies} valid={one.valid}"
            title += f' problem="{one.problem}"' if one.problem else ""
            for chain, residues in (("heavy", one.heavy), ("light", one.light)):
                if residues:
                    file.write(f">{names[one.request]}_{one.rank}_{chain} {title}\n{residues}\n")


def _name_antigens(ids: Sequence[Any], numbers: Sequence[int]) -> list[str]:
    """Names each antigen in a FASTA by one word: its id, with its row where ids are missing or repeat."""
    words = ["_".join(str(one or "").split()) for one in ids]
    return [
        word if word and words.count(word) == 1 else f"{word}_row{number}".lstrip("_")
        for word, number in zip(words, numbers)
    ]
