"""What every task does alike, whatever it trains: reads its command, checks and tells its data, leaves its pages.

Affinity, masked language modelling, prediction and the doctor use it; it knows none of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainingArguments

from .arguments.parser import FastArgumentParser
from .arguments.presets import PRESETS
from .data.columns import read_columns
from .errors import ArgumentError, DataError, NotFiniteError
from .evaluation.requirements import Checked, describe_failed, format_checked, raise_failed
from .reporting.card import write_card
from .reporting.charts import plot_loss
from .reporting.near_copies import describe_near_copies
from .reporting.report import write_report
from .reporting.run_record import absolute_if_local, record_evaluations, record_run, write_json
from .training_args import OWN_FIELDS, FastTrainingArguments

STREAM_CHECK_ROWS = 1000
MAX_LISTED = 10  # rows in a message

logger = logging.getLogger(__name__)


def parse_command(
    arguments: Sequence[type], defaults: Mapping[str, Any], description: str | None, words: Sequence[str] | None
) -> tuple[FastArgumentParser, tuple[Any, ...]]:
    """The parser of a recipe after parsing, and an instance of each of `arguments`.

    Args:
        arguments: dataclasses; the `FastTrainingArguments` among them learns which of its fields the user set.
        defaults: the recipe's own, {field name: value}.
        description: for `--help`.
        words: the command line; None takes the process's own.

    Raises:
        ArgumentError: as `FastArgumentParser.parse_args_into_dataclasses`.
    """
    parser = FastArgumentParser(arguments, presets=PRESETS, defaults=defaults, description=description)
    parsed = parser.parse_args_into_dataclasses(None if words is None else [*words])
    for values in parsed:
        if isinstance(values, FastTrainingArguments):
            values.mark_explicit(parser.explicit)
    return parser, parsed


def stock_arguments(args: Any, explicit: frozenset[str], **changed: Any) -> TrainingArguments:
    """`args` as plain `TrainingArguments`, for the stock Trainer.

    Args:
        args: `FastTrainingArguments`.
        explicit: the fields that the user set; a preset's speed-ups are left out, since a control has none.
        changed: what has another value there.

    Raises:
        ArgumentError: the user set a field that the stock Trainer does not have.
    """
    foreign = explicit & OWN_FIELDS.keys() - {"preset", "embedding_cache_dir"}
    asked = sorted(name for name in foreign if getattr(args, name) not in (None, False, [], "no"))
    if asked:
        raise ArgumentError(f"--stock_trainer has none of {', '.join(asked)}: leave them out, or train without it.")
    values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TrainingArguments) if spec.init}
    # On a machine without a GPU it takes bf16 only together with `use_cpu`.
    return TrainingArguments(**{**values, "use_cpu": args.device.type == "cpu", **changed})


def check_inputs(collator: Any, splits: Mapping[str, Any], source: str | None = None) -> dict[str, dict[str, float]]:
    """Checks that the vocabulary and the length limit of each encoder fit the data, before anything is computed.

    Args:
        collator: `SequenceCollator` or `MaskedLMCollator`.
        splits: name -> rows; of a stream the first `STREAM_CHECK_ROWS` stand for all.
        source: where the rows are from, for messages.

    Returns:
        Per input: share of unknown residues, longest row in residues, number of rows above the limit.

    Raises:
        DataError: more than 1 % unknown residues, or rows above the limit with `too_long="error"`: how many, and the
            first ones with file row and length.
    """
    report = {}
    for name, columns in collator.columns.items():
        rows = [row for split in splits.values() for row in _distinct(split, columns)]
        tokenizer = collator.tokenizers[name]
        unknown = tokenizer.check_contract([part for row in rows for part in row], name)
        lengths = [sum(map(len, row)) for row in rows]
        limit = tokenizer.max_residues
        above = [row for row, length in zip(rows, lengths) if limit is not None and length > limit]
        if above:
            try:
                collator.encode(name, *zip(max(above, key=lambda row: sum(map(len, row)))))  # raises unless allowed
            except DataError as error:
                rows_above = _list_long(splits, columns, limit, source)
                raise DataError(f"{error}\n{rows_above}") from error
        report[name] = {"unknown_share": unknown, "longest": max(lengths), "num_above_limit": len(above)}
    return report


def _list_long(splits: Mapping[str, Any], columns: Sequence[str], limit: int, source: str | None) -> str:
    """Rows above the limit: how many, and the first ones."""
    found = []
    for split_name, split in splits.items():
        rows = split if hasattr(split, "__len__") else islice(split, STREAM_CHECK_ROWS)
        for number, row in enumerate(rows, 1):
            length = sum(len(row[column]) for column in columns)
            if length > limit:
                found.append(f"row {row.get('source_row', number)} of {split_name} ({length:,} residues)")
    more = f" and {len(found) - MAX_LISTED:,} more" if len(found) > MAX_LISTED else ""
    return (
        f"{source or 'The data'}: {len(found):,} row{'s are' if len(found) > 1 else ' is'} too long: "
        f"{', '.join(found[:MAX_LISTED])}{more}. Or leave them out: --max_residues N --bad_rows drop, N per column."
    )


def _distinct(split: Any, columns: Sequence[str]) -> Iterable[tuple[str, ...]]:
    if hasattr(split, "__len__"):
        return dict.fromkeys(read_columns(split, columns))
    return dict.fromkeys(tuple(row[column] for column in columns) for row in islice(split, STREAM_CHECK_ROWS))


def summarize_data(report: Mapping[str, Any]) -> str:
    """A data report in a few lines: rows, changes, split sizes, leaks, inputs, and what its notes and warnings say."""
    notes = [f"  note: {note}" for note in (*report.get("split", {}).get("notes", ()), *report.get("notes", ()))]
    notes += [f"  WARNING: {warning}" for warning in report.get("warnings", ())]
    if report.get("streaming"):
        return "\n".join(["Data: streaming: rows are not counted, leaks between splits are not looked for.", *notes])
    lines = [
        f"Data: {report['rows_read']:,} rows read, {report['rows_filtered_out']:,} filtered out, "
        f"{report['rows_rejected']:,} rejected; " + ", ".join(f"{n} {size:,}" for n, size in report["sizes"].items())
    ]
    for name, nums in report.get("missing_chains", {}).items():
        shown = (f"{num:,} of {report['sizes'][split]:,} in {split}" for split, num in nums.items())
        lines.append(f"  rows without {name}: {', '.join(shown)}")
    leaks = report.get("leaks") or {"columns": {}}
    rows = {**leaks["columns"], **({"whole rows": leaks["row"]} if len(leaks["columns"]) > 1 else {})}
    both = ("num_test_sequences_in_train", "num_test_sequences")
    known = [f"{leak[both[0]]:,} of {leak[both[1]]:,} {name}" for name, leak in rows.items()]
    lines += [f"  test sequences that are in train, too: {', '.join(known)}"] if known else []
    lines += [f"  {line}" for line in describe_near_copies(leaks)[:1]]  # of whole rows; the report has each column
    inputs = report.get("inputs", {})
    longest = ", ".join(f"{name} {facts['longest']:,}" for name, facts in inputs.items())
    lines += [f"  residues of the longest input: {longest}"] if inputs else []
    for name, facts in inputs.items():
        if facts["num_above_limit"]:
            lines.append(f"  {name}: {facts['num_above_limit']:,} rows above the encoder's limit")
        if facts["unknown_share"]:
            lines.append(f"  {name}: {facts['unknown_share']:.2%} of the residues are unknown to its tokenizer")
    return "\n".join([*lines, *notes])


def check_scored(values: Any, split: str) -> None:
    """Refuses to score predictions that are no numbers, as of a model that diverged under stock Trainer.

    Args:
        values: (n, columns), what each row is scored by.
        split: which rows, in words.

    Raises:
        NotFiniteError: some are NaN or infinite.
    """
    finite: Any = np.isfinite(np.asarray(values, np.float64)).all(1)
    if not finite.all():
        raise NotFiniteError(
            f"{(~finite).sum():,} of {len(finite):,} {split} rows have errors that are NaN or infinite: no score. "
            "Usual causes: a learning rate that is too high, float16 that overflows. Train again with a lower "
            "--learning_rate, into another --output_dir."
        )


def with_absolute_path(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`facts` with its entry `name`, a path or a Hub id, as an absolute path where it is one."""
    return {**facts, name: absolute_if_local(facts[name])}


@contextmanager
def plots_if_possible() -> Iterator[None]:
    """Says in the log what cannot be plotted: a run too short to log, or one that diverged, still has its results."""
    try:
        yield
    except DataError as error:
        logger.warning("Not plotted: %s", error)


def save_results(
    trainer: Any,
    trained: Any,
    task: str,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    parser: FastArgumentParser,
) -> dict[str, Any]:
    """Writes `all_results.json` and `loss.png` into the output folder; returns what the JSON holds.

    Args:
        trainer, trained: after training, and what `train` returned; stock Trainer's too.
        task: its name in the JSON, by which report and card find their pages.
        facts: JSON-able, what the task adds: its scores, their verdict, data. `model` is joined with what every
            model has.
        settings: arguments of model and data by name; training arguments come from the trainer.
        parser: after parsing; it knows the command line and where each argument came from.
    """
    record = record_run(trainer, trained, settings, parser.origins, parser.arguments)
    evaluations = record_evaluations(trainer) if hasattr(trainer, "evaluation_facts") else {}
    model = {**record["model"], **facts.get("model", {})}
    results = {**record, **evaluations, "task": task, **facts, "model": model}
    if trainer.is_world_process_zero():
        folder = Path(str(trainer.args.output_dir))
        write_json(folder / "all_results.json", results)
        with plots_if_possible():
            plot_loss(trainer.state.log_history, folder / "loss.png")
    return results


def finish_run(trainer: Any, log: logging.Logger, required: Sequence[Checked] = ()) -> None:
    """Writes report and card beside the results, pushes where that was asked for, and ends the trainer.

    Args:
        trainer: after `save_results`; stock Trainer's too.
        log: where the last line goes.
        required: what the final scores had to be.

    Raises:
        RequirementsFailed: a score is not as required; after everything else.
    """
    if required:
        log.info("\nRequired:\n%s\n", format_checked(required))
    leave_pages(trainer)
    log.info("Report: %s/report.html; all else of the run is in that folder, too.", trainer.args.output_dir)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()
    raise_failed(describe_failed(required), f"Model and report are whole, in {trainer.args.output_dir}.")


def leave_pages(trainer: Any) -> None:
    """Writes report and card beside the results of `trainer`, which trains no more but has not ended."""
    folder = str(trainer.args.output_dir)
    if trainer.is_world_process_zero():
        write_report(folder)
        write_card(folder, repo_id=trainer.hub_model_id)
