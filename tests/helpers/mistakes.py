"""Mistakes that users make, as rows of a table: what they give, what must be said, and the innocent twin beside it."""

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from inside import build_affinity_model

from hf_ext.arguments import parse_command
from hf_ext.data import check_inputs
from hf_ext.errors import HfExtError
from hf_ext.property import TASK, build_collator, resolve_training
from hf_ext.property.rows import describe_rows, load_rows

NUM_ROWS = 60


def make_sequence(number: int, length: int = 20) -> str:
    """The same letters for the same number; two of them share little."""
    return "".join(random.Random(number).choices("ACDEFGHIKLMNPQRSTVWY", k=length))


def spread(low: float, high: float, num: int = NUM_ROWS) -> list[float]:
    """`num` distinct numbers from `low` to `high`, in a mixed order that is always the same."""
    values = [round(low + (high - low) * index / (num - 1), 4) for index in range(num)]
    random.Random(0).shuffle(values)
    return values


BASE: dict[str, list[Any]] = {
    "sequence": [make_sequence(number) for number in range(NUM_ROWS)],
    "pKd": spread(5.2, 11.3),
}


@dataclass(frozen=True)
class Case:
    """What a user gives: 60 rows of sequence and pKd, or what becomes of them, and words of a command line.

    Attributes:
        cells: (row of the file, column) -> what stands there instead; row 1 is the header.
        columns: more columns, or others in place of the two.
        words: further words of the command line; {folder} and {encoder} are filled in.
        text: the whole file, instead.
        make: writes something else into the folder and returns what --dataset_name says.
    """

    cells: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    words: str = ""
    text: str | None = None
    make: Callable[[Path], Path] | None = None

    def write(self, folder: Path) -> Path:
        """Writes the file; returns its path."""
        if self.make:
            return self.make(folder)
        path = folder / "a.csv"
        if self.text is not None:
            path.write_text(self.text)
            return path
        table = {name: list(values) for name, values in {**BASE, **self.columns}.items()}
        for (row, column), value in self.cells.items():
            table[column][row - 2] = value
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values())])
        return path

    def command(self, folder: Path, encoder: str) -> list[str]:
        """The words of the command line."""
        name, output = self.write(folder), folder / "out"
        fixed = f"--dataset_name {name} --output_dir {output} --use_cpu true --label_column pKd --encoders {encoder}"
        # The last one counts, so a mistake's own words come last.
        return [*fixed.split(), *(word.format(folder=folder, encoder=encoder) for word in self.words.split())]


@dataclass(frozen=True)
class Mistake:
    """One row of the table.

    Attributes:
        name: what the user did.
        given: the mistake.
        says: words that must appear, all of them; {file} is the path.
        twin: what looks alike and is no mistake: it must pass without a warning, an alarm or a note.
        kind: "error" ends the run before anything is computed; "warning" and "note" stand in its log.
    """

    name: str
    given: Case
    says: Sequence[str]
    twin: Case = field(default_factory=Case)
    kind: Literal["error", "warning", "note"] = "error"


def parametrized(mistakes: Sequence[Mistake]) -> pytest.MarkDecorator:
    """`mistake`, each under its name."""
    return pytest.mark.parametrize("mistake", mistakes, ids=[one.name for one in mistakes])


def look_at(case: Case, folder: Path, encoder: str) -> str:
    """What the log says of data and options, up to where training would begin."""
    _, (model_args, data_args, args) = parse_command(
        TASK.all_arguments, TASK.defaults, None, case.command(folder, encoder)
    )
    data = load_rows(model_args, data_args, output_dir=folder / "out", seed=args.seed)
    model_args.tower_training, args.use_peft = resolve_training(model_args, args.use_peft)
    model = build_affinity_model(model_args, data_args.sequence_columns)
    collator = build_collator(model, data_args)
    data.report["inputs"] = check_inputs(collator, data.splits, data_args.dataset_name)
    return describe_rows(data)


def remarks(text: str) -> list[str]:
    """Lines that tell a user to think again."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith(("WARNING", "ALARM", "note"))]


def check_mistake(mistake: Mistake, folder: Path, encoder: str) -> None:
    """Asserts that the mistake is called what it is."""
    wanted = [words.format(file=folder / "a.csv", folder=folder) for words in mistake.says]
    if mistake.kind == "error":
        with pytest.raises(HfExtError) as error:
            TASK.main(mistake.given.command(folder, encoder))
        said = [str(error.value)]
    else:
        starts = {"warning": ("WARNING", "ALARM"), "note": ("note",)}[mistake.kind]
        said = [line for line in remarks(look_at(mistake.given, folder, encoder)) if line.startswith(starts)]
    assert any(all(words in text for words in wanted) for text in said), f"{wanted} not in {said}"


def check_twin(mistake: Mistake, folder: Path, encoder: str) -> None:
    """Asserts that the innocent twin passes, and without a word."""
    assert remarks(look_at(mistake.twin, folder, encoder)) == []
