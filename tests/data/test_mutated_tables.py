"""Mutated tables: refused with file and row, or read as a second reader reads them, every line accounted for."""

import csv
import logging
import random
import re

import pytest
from closing_line import tally
from mutated_tables import Reading, make_table, mutate, read_again, write_table

from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data
from hf_ext.errors import DataError

NAMES = ("a.csv", "a.csv.gz", "a.tsv")


def load(path, folder, bad_rows):
    """Rows by their line, as (id, sequence, label, group); DataError where the table is refused."""
    args = DataArguments(
        dataset_name=str(path), id_column="id", group_column="group", bad_rows=bad_rows, split_sizes=[0.8, 0.1, 0.1]
    )
    loaded = load_data(args, output_dir=folder, seed=0, looks_for_leaks=False)
    return {
        row["source_row"]: (row["id"], row["sequence"], row["label"], row["group"])
        for split in loaded.splits.values()
        for row in split
    }


def rejected_lines(folder) -> set[int]:
    path = folder / "rejected_rows.csv"
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {int(line["row"]) for line in csv.DictReader(file)}


def silent_differences(rows, rejected, messages: str, other: Reading) -> list[str]:
    """What was read otherwise, or not at all, without a word; [] is right."""
    found = [f"line {line}: {rows[line]}" for line in rows if rows[line] != other.rows.get(line)]
    found += [f"line {line}: lost" for line in other.rows if line not in rows and line not in rejected]
    for first, last in other.joined:
        if first not in rejected and f"{first} to {last}" not in messages:
            found.append(f"lines {first} to {last}: joined")
    covered = {line for first in (*rows, *rejected) for line in range(first, other.lines.get(first, first) + 1)}
    blank = [first for first in other.lines if first not in covered and first != min(other.lines)]
    found += [f"line {line}: not accounted for" for line in blank if max(covered, default=0) > line]
    return found


def judge(tmp_path, caplog, seed: int) -> str:
    rng = random.Random(seed)
    name = rng.choice(NAMES)
    delimiter = "\t" if name.endswith(".tsv") else ","
    data = mutate(rng, make_table(rng, delimiter), delimiter)
    folder = tmp_path / str(seed)
    folder.mkdir()
    path, bad_rows = write_table(folder, name, data), rng.choice(["error", "drop"])
    caplog.clear()
    try:
        rows, message = load(path, folder, bad_rows), ""
    except DataError as error:
        rows, message = {}, str(error)
    if message:
        assert str(path) in message, message
        assert all(line.isprintable() for line in message.split("\n")), ascii(message)
        assert re.search(r"rows? \d|column|empty|only a header|one row|training (labels|rows)", message), message
        return "refused"
    rejected = rejected_lines(folder)
    differences = silent_differences(rows, rejected, caplog.text, read_again(data, delimiter))
    assert differences == [], (seed, data)
    return "accepted without some rows" if rejected else "accepted"


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.nightly
def test_a_thousand_mutated_tables_hold_no_silent_difference(tmp_path, messages, request):
    names = {"refused": 0, "accepted": 0, "accepted_without_some_rows": 0, "silent_differences": 0}
    with tally(request, "mutated tables", files=0, **names) as counts:
        for seed in range(1000, 2000):
            counts["files"] += 1
            counts[judge(tmp_path, messages, seed).replace(" ", "_")] += 1
    assert counts["files"] == 1000
    assert counts["refused"] > 300
    assert counts["accepted"] > 100


def test_the_second_reader_tells_a_swallowed_row_and_a_foreign_digit(tmp_path):
    swallowed = read_again(b'id,sequence,note,label,group\nr1,MKT,"x,1,a\nr2,MKV,y",2,b\n', ",")
    assert silent_differences({2: ("r1", "MKT", 2.0, "b")}, set(), "", swallowed) == ["lines 2 to 3: joined"]
    foreign = read_again("id,sequence,note,label,group\nr1,MKT,x,\u0663,a\n".encode(), ",")
    assert silent_differences({2: ("r1", "MKT", 3.0, "a")}, set(), "", foreign) == ["line 2: ('r1', 'MKT', 3.0, 'a')"]
    lost = read_again(b"id,sequence,note,label,group\nr1,MKT,x,1,a\nr2,MKV,x,2,a\n", ",")
    assert silent_differences({3: ("r2", "MKV", 2.0, "a")}, set(), "", lost) == [
        "line 2: lost",
        "line 2: not accounted for",
    ]
