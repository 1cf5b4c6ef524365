"""Damaged Parquet files: an error with file, row group and row, or exactly the values that are stored in them."""

import datetime
import random
from collections import Counter
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from closing_line import tally
from one_table import read_table

from hf_ext.errors import DataError

NUM_ROWS, GROUP_ROWS = 240, 80
COLUMNS = ["id", "sequence", "label", "count"]
FORMS = [
    {"compression": codec, "use_dictionary": dictionary, "write_page_checksum": checksum}
    for codec, dictionary, checksum in product(("snappy", "gzip", "zstd", "none"), (True, False), (True, False))
]
DAMAGES = ("bit", "bit", "bit in the footer", "bit in the header", "byte", "cut", "zero block")
RIGHT, NAMED, UNSEEN = "read right", "named", "changed values that only checksums show"


def make_table(rng: random.Random) -> pa.Table:
    return pa.table(
        {
            "id": [f"r{number}" for number in range(NUM_ROWS)],
            "sequence": ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(5, 60))) for _ in range(NUM_ROWS)],
            "label": [rng.gauss(0, 1) for _ in range(NUM_ROWS)],
            "count": [rng.choice([1, 2, 3, None]) for _ in range(NUM_ROWS)],
        }
    )


def damage(rng: random.Random, content: bytes, kind: str) -> bytes:
    changed, size = bytearray(content), len(content)
    footer = size - 8 - int.from_bytes(content[-8:-4], "little")
    if kind == "cut":
        return content[: rng.randrange(size)]
    if kind == "byte":
        changed[rng.randrange(size)] ^= rng.randrange(1, 256)
    elif kind == "zero block":
        start = rng.randrange(size)
        changed[start : start + 64] = bytes(len(changed[start : start + 64]))
    else:
        place = rng.randrange(*{"bit": (size,), "bit in the footer": (footer, size), "bit in the header": (60,)}[kind])
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def read(path) -> list[dict]:
    return [{name: row[name] for name in COLUMNS} for row in read_table(str(path), COLUMNS)]


def judge(folder, seed: int) -> tuple[str, str, dict]:
    """What became of one damaged file, the kind of damage, and how the file was written."""
    rng = random.Random(seed)
    form, kind, table = FORMS[seed % len(FORMS)], rng.choice(DAMAGES), make_table(rng)
    path = folder / f"{seed}.parquet"
    pq.write_table(table, path, row_group_size=GROUP_ROWS, **form)
    path.write_bytes(damage(rng, path.read_bytes(), kind))
    try:
        rows, message = read(path), ""
    except DataError as error:
        rows, message = [], str(error)
    if message:
        assert message.startswith(str(path)), message
        assert message.isprintable(), ascii(message)
        return NAMED, kind, form
    if repr(rows) == repr(table.to_pylist()):
        return RIGHT, kind, form
    # Without page checksums, a changed number is a number: then pyarrow must see what we see, and no row may be lost.
    assert not form["write_page_checksum"], (seed, kind)
    assert repr(rows) == repr(pq.read_table(path, columns=COLUMNS).to_pylist()), (seed, kind)
    assert len(rows) == NUM_ROWS
    return UNSEEN, kind, form


def test_damaged_parquet_is_named_or_read_right(tmp_path):
    found = Counter(judge(tmp_path, seed)[0] for seed in range(24))
    assert found[NAMED] >= 8
    assert sum(found.values()) == 24


@pytest.mark.nightly
def test_two_hundred_damaged_parquet_files(tmp_path, request):
    names = {NAMED: 0, RIGHT: 0, UNSEEN: 0, "raw exceptions": 0, "rows lost": 0}
    with tally(request, "damaged Parquet files", files=0, **names) as counts:
        for seed in range(100, 300):
            outcome = judge(tmp_path, seed)[0]
            counts["files"] += 1
            counts[outcome] += 1
    assert counts["files"] == 200
    assert counts[NAMED] > 80


def test_damage_in_a_page_names_row_group_and_row(tmp_path):
    path = tmp_path / "a.parquet"
    form = {"use_dictionary": False, "write_page_checksum": True}
    pq.write_table(make_table(random.Random(0)), path, row_group_size=GROUP_ROWS, **form)
    content = bytearray(path.read_bytes())
    place = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset + 1000  # far behind its header
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, row group 2: not a readable Parquet file after row 80 (")
    with pytest.raises(DataError, match="row group 2"):
        list(read_table(str(path), COLUMNS, streaming=True))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_footer_with_another_number_of_rows_loses_none(tmp_path, change):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"sequence": ["MKTVL"] * 40}), path, row_group_size=20)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # Thrift's whole numbers are zigzag: 20 rows are byte 40. Only the last 20 of a row group are its count.
    places = [i for i in range(start, len(content) - 8) if content[i] == 40]
    assert places
    for place in places:
        path.write_bytes(content[:place] + bytes([40 + 2 * change]) + content[place + 1 :])
        try:
            num_rows = len(read_table(str(path), ["sequence"]))
        except DataError as error:
            num_rows = 40 if str(error).startswith(str(path)) else 0
        assert num_rows == 40, place


def test_text_that_is_not_utf_8_in_a_parquet_column_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"sequence": ["MKTVL", "MKTQQ"]}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    assert content.count(b"MKTQQ") >= 1
    path.write_bytes(content.replace(b"MKTQQ", b"MK\xffQQ"))
    with pytest.raises(DataError, match=r"a\.parquet, row group 1: not a readable Parquet file \(.*UTF8"):
        read_table(str(path), ["sequence"])


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_keep_numbers_and_become_text_else(tmp_path, streaming):
    day = pa.array([{"day": datetime.date(2026, 1, 2)}], pa.struct({"day": pa.date32()}))
    sequence, nothing = pa.array(["MKTVL"]).dictionary_encode(), pa.array([None], pa.float64())
    table = pa.table({"sequence": sequence, "id": [b"r\xff"], "x": day, "label": [1.5], "none": nothing, "n": [2]})
    pq.write_table(table, tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    (row,) = read_table(path, ["sequence", "label"], streaming=streaming)
    assert row == {"sequence": "MKTVL", "label": 1.5, "source_row": 1}
    (row,) = read_table(path, streaming=streaming)
    assert (row["id"], row["x"], row["n"], row["none"]) == ("r\ufffd", '{"day": "2026-01-02"}', 2, None)
