"""Mutated tables: refused with file and row, or read as a second reader reads them, every line accounted for."""

import csv
import gzip
import io
import logging
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pytest

from hf_ext.data import DataArguments, load_data
from hf_ext.errors import DataError

HEADER = ["id", "sequence", "note", "label", "group"]
NOTES = ("fine", "binds, but weakly", 'the "old" batch', "see Fig. 2", "", "a; b")
PIECES = (
    *('"', '""', ',"', '",', "'", ",", ",,", "\t", ";", "\n", "\n\n", "\r", "\r\n", "\r\r\n", " ", "\0", "\u00a0"),
    *("\u0663", "\uff17", "1_0", "e-400", "e400", "nan", "inf", "-", "+", "<=", "0x1", ".", "*", "X"),
    *("\ufeff", "\u2028", "\u200b", "\U0001f9ec", "=1+1", "#", "\\", '"a\nb"', ',"two\nlines",'),
)
RESIDUES = "ACDEFGHIKLMNPQRSTVWYXUZOBJ"


@dataclass
class Reading:
    """What the second reader finds: usable rows by their line, and lines of records over several lines."""

    rows: dict[int, tuple[str, str, float, str]] = field(default_factory=dict)
    joined: list[tuple[int, int]] = field(default_factory=list)
    lines: dict[int, int] = field(default_factory=dict)  # first line of every record -> its last line


def make_table(rng: random.Random, delimiter: str) -> bytes:
    """Twelve sound rows."""
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
    writer.writerow(HEADER)
    for number in range(12):
        sequence = "".join(rng.choices(RESIDUES[:20], k=rng.randint(6, 30)))
        label = f"{rng.choice(['', '', '<=', '>'])}{rng.uniform(-9, 9):.3f}"
        writer.writerow([f"r{number}", sequence, rng.choice(NOTES), label, rng.choice("abc")])
    return sink.getvalue().encode()


def mutate(rng: random.Random, data: bytes, delimiter: str) -> bytes:
    """One to three faults: pieces put in, bytes changed, lines lost, repeated or joined, stray quotes."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = rng.choice([_put_in, _put_in, _change_bytes, _lines, _stray_quotes])(rng, data, delimiter)
    return data


def _put_in(rng: random.Random, data: bytes, delimiter: str) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(PIECES).encode() + data[place:]


def _change_bytes(rng: random.Random, data: bytes, delimiter: str) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def _lines(rng: random.Random, data: bytes, delimiter: str) -> bytes:
    lines = data.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    what = rng.choice(["repeat", "swap", "join", "cut"])
    if what == "repeat":
        lines.insert(place, lines[place])
    elif what == "swap":
        lines[place], lines[-1] = lines[-1], lines[place]
    elif what == "join":
        lines[place] = lines[place].rstrip(b"\r\n")
    else:
        lines = [*lines[:place], lines[place][: len(lines[place]) // 2]]
    return b"".join(lines) or data


def _stray_quotes(rng: random.Random, data: bytes, delimiter: str) -> bytes:
    """A quote where a field begins and one where a later field ends, which is legal CSV."""
    edges = [i for i, byte in enumerate(data) if bytes([byte]) in (delimiter.encode(), b"\n")]
    if len(edges) < 3:
        return data
    first, last = sorted(rng.sample(edges, 2))
    last -= data[last - 1 : last] == b"\r"
    return data[: first + 1] + b'"' + data[first + 1 : last] + b'"' + data[last:]


def write_table(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    return path


def read_again(data: bytes, delimiter: str) -> Reading:
    """Reads sound UTF-8 with Python's lenient csv; what a row must hold is worked out here in another way."""
    text = data.decode("utf-8").removeprefix("\ufeff")
    found = Reading()
    reader = csv.reader(re.findall(r"[^\n]*\n|[^\n]+", text), delimiter=delimiter)
    header: list[str] | None = None
    while True:
        first = reader.line_num + 1
        record = next(reader, None)
        if record is None:
            return found
        if not record:  # a blank line is no row, in any reader
            continue
        found.lines[first] = reader.line_num
        if reader.line_num > first:
            found.joined.append((first, reader.line_num))
        if header is None:
            header = [name.strip() for name in record] if any(cell.strip() for cell in record) else None
        elif len(record) == len(header) and set(HEADER) - {"note"} <= set(header):
            cells = dict(zip(header, record))
            label = read_label(cells["label"])
            sequence = cells["sequence"].strip().upper().removesuffix("*")  # a stop at the end is taken off
            is_sound = bool(sequence) and cells["sequence"].isascii() and not set(sequence) - set(RESIDUES)
            if label is not None and is_sound:
                found.rows[first] = (cells["id"], sequence, label, cells["group"])


def read_label(cell: str) -> float | None:
    """The number in a cell, without its sign of a bound; None where there is none, or one beyond 1e30."""
    text = cell.strip().replace("\u2264", "<=").replace("\u2265", ">=")
    for sign in ("<=", ">=", "<", ">", "="):
        if text.startswith(sign):
            text = text[len(sign) :].strip()
            break
    if not text.isascii() or "_" in text:
        return None
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return None
    if not exact.is_finite() or abs(exact) > 10**30:
        return None
    return float(exact)


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
def test_a_thousand_mutated_tables_hold_no_silent_difference(tmp_path, messages):
    counts = Counter(judge(tmp_path, messages, seed) for seed in range(1000, 2000))
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
