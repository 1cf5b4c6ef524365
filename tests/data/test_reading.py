"""Files as rows: every format, what is wrong with a file, files that are none, and damaged Parquet."""

import datetime
import gzip
import json
import logging
import os
import random
from collections import Counter
from itertools import chain, product

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets

from hf_ext.data import DataArguments, load_data
from hf_ext.data.reading import read_parts
from hf_ext.errors import DataError

pytestmark = pytest.mark.internals


def read_table(name, columns=None, **options):
    return concatenate_datasets([part.data for part in read_parts(name, columns, **options)])


CSV = "sequence,label\nMKTVL,1.5\nNA,2\n"
ROWS = {"sequence": ["MKTVL", "NA"], "label": ["1.5", "2"], "source_row": [2, 3]}


def write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


def fault(path, columns=None, **kwargs):
    with pytest.raises(DataError) as error:
        list(read_table(str(path), columns, **kwargs))
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("a.csv.gz", CSV),
        ("a.TSV", CSV.replace(",", "\t")),
        ("bom_crlf.csv.gz", "\ufeff" + CSV.replace("\n", "\r\n")),
        ("no_last_newline.csv", CSV.rstrip("\n")),
        ("blank_lines_at_the_end.csv", CSV + "\n\n"),
        ("spaces_in_header.csv", CSV.replace("sequence,label", "sequence , label")),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_form_of_a_delimited_file_gives_the_same_text(tmp_path, name, content, streaming):
    data = read_table(write(tmp_path / name, content), streaming=streaming)
    assert isinstance(data, IterableDataset if streaming else Dataset)
    assert list(data) == [dict(zip(ROWS, cells)) for cells in zip(*ROWS.values())]


@pytest.mark.parametrize(("suffix", "streaming"), [("fasta", False), ("faa.gz", True)])
def test_fasta_headers_become_columns(tmp_path, suffix, streaming):
    text = "\n>s1 some words pKd=7.3 group=a\nMKT\nVL\n\n>s2 group=b pKd=<=6\nACDEF\n>s3\n\n"
    data = read_table(write(tmp_path / f"a.{suffix}", text), streaming=streaming)
    assert list(data) == [
        {"id": "s1", "pKd": "7.3", "group": "a", "sequence": "MKTVL", "source_row": 2},
        {"id": "s2", "pKd": "<=6", "group": "b", "sequence": "ACDEF", "source_row": 6},
        {"id": "s3", "pKd": None, "group": None, "sequence": "", "source_row": 8},
    ]


def test_wrapped_fasta_is_read_whole_where_sequences_fill_their_lines(tmp_path):
    letters = "ACDEFGHIKLMNPQRSTVWY" * 20
    for width in (60, 70, 80):
        for lengths in ([2 * width] * 30, [width, 2 * width, 3 * width, 2 * width + 1] * 10, [4 * width]):
            whole = [letters[start : start + length] for start, length in enumerate(lengths)]
            lines = ["\n".join(one[at : at + width] for at in range(0, len(one), width)) for one in whole]
            text = "".join(f">s\n{body}\n" for body in lines)
            assert read_table(write(tmp_path / "a.fasta", text))["sequence"][:] == whole


def test_annotations_in_a_stream_are_refused_before_its_first_row(tmp_path):
    text = "".join(f">s\n{'ACDEFGHIKLMN'[:length]}\n{'HHHEEECCCCCC'[:length]}\n" for length in (9, 12, 10))
    path = write(tmp_path / "a.fasta", text)
    assert "row 1: below the sequence stand as many letters again (HHHEEECCC)" in fault(path, streaming=True)


@pytest.mark.parametrize(("name", "streaming"), [("a.jsonl", False), ("b.jsonl.gz", True)])
def test_json_lines_keep_numbers_and_rows(tmp_path, name, streaming):
    text = '{"sequence": "MKTVL", "label": 1.5}\n\n{"sequence": "null", "label": 2}\n'
    data = read_table(write(tmp_path / name, text), streaming=streaming)
    assert list(data) == [
        {"sequence": "MKTVL", "label": 1.5, "source_row": 1},
        {"sequence": "null", "label": 2.0, "source_row": 3},
    ]


def test_json_column_of_mixed_types_becomes_text_and_absent_keys_null(tmp_path):
    lines = [{"label": 7.5}, {"label": "<=7", "x": [1]}, {"label": 3, "x": None}]
    data = read_table(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert data["label"][:] == ["7.5", "<=7", "3"]
    assert data["x"][:] == [None, "[1]", None]
    many = [{"label": 7, "y": 1}] * 1000 + [{"label": 7.5, "y": 2}]  # tables of a thousand rows are joined
    data = read_table(write(tmp_path / "b.jsonl", "\n".join(map(json.dumps, many))))
    assert (data["label"][:], data["y"][-1]) == ([7.0] * 1000 + [7.5], 2)
    many.append({"label": "<=7"})
    data = read_table(write(tmp_path / "c.jsonl", "\n".join(map(json.dumps, many))))
    assert data["label"][:] == ["7"] * 1000 + ["7.5", "<=7"]
    assert data["source_row"][-1] == 1002


OBJECT = '{"sequence": "MKTVL"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.fa", "MKTVL\n>s1\nMKTVL\n", "row 1: FASTA records start with '>'"),
        ("a.jsonl", OBJECT + '{"sequence": }', "row 2: not valid JSON (Expecting value: line 1 column 14"),
        ("a.jsonl", OBJECT + '["MKTVL"]', "row 2: a JSON object such as"),
        ("a.jsonl", OBJECT + "[" * 100_000, "row 2: not valid JSON"),
        ("a.json", OBJECT * 2, "a .jsonl file one object a line"),
        ("a.json", OBJECT, "row 1: a JSON object such as"),
        ("a.fasta", "\n", "the file has no records"),
        ("a.csv", "sequence,sequence\nA,B\n", "row 1: column 'sequence' occurs more than once"),
        ("a.csv", "sequence\tlabel\nMKTVL\t1\n", "row 1: the text is tab-separated; save it as"),
        ("a.csv", "sep=;\n" + CSV.replace(",", ";"), "row 1: the text is semicolon-separated"),
        ("a.csv", CSV + '"two\nlines",1\nMKTVA\n\nMKTVC,1,2\n', "row 6 has 1, row 8 has 3"),
        ("a.csv", CSV + '"MKTVA,7\nMKTVG,8\n', "row 4 has 1."),
        ("a.csv", "sequence,label\rMKTVL,1\r", "end lines with LF or CRLF"),
        ("a.csv", b"sequence,label\nMKTVL,1\nMK\xd1VL,2\n", "row 3: not UTF-8 text (byte 0xd1)"),
    ],
)
def test_structural_fault_names_file_and_row(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert message in fault(path)
    assert message in fault(path, streaming=True)
    assert fault(path).startswith(path)


@pytest.mark.parametrize("cut", [5, 300])
def test_truncated_gzip_is_named(tmp_path, cut):
    data = gzip.compress(b"sequence\n" + b"".join(b"MKTVL%d\n" % i for i in range(5000)), compresslevel=1)
    (tmp_path / "a.csv.gz").write_bytes(data[:cut])
    assert "cannot be read after row" in fault(str(tmp_path / "a.csv.gz"))
    (tmp_path / "b.csv.gz").write_text(CSV)
    assert "if it is not packed, take .gz off its name" in fault(str(tmp_path / "b.csv.gz"))


def test_file_not_found_names_the_nearest_files(tmp_path):
    write(tmp_path / "binders.csv", CSV)
    write(tmp_path / "other.txt", CSV)
    assert "file not found. There are: binders.csv." in fault(str(tmp_path / "binder.csv"))
    assert "file not found. There are: binders.csv." in fault(str(tmp_path / "zzz.parquet"))
    assert f"there is no folder {tmp_path / 'no'}" in fault(str(tmp_path / "no" / "a.csv"))
    assert "other.txt: unknown format. Use .csv" in fault(str(tmp_path / "other.txt"))


SHARDS = {"train": [["DDDDD", "DDDDE"], ["DDDDF"]], "validation": [["CCCCC"]], "test": [["NA"]]}


def write_shards(folder):
    folder.mkdir(parents=True)
    for split, shards in SHARDS.items():
        for number, sequences in enumerate(shards):
            table = pa.table({"sequence": sequences, "n": [1] * len(sequences)})
            pq.write_table(table, folder / f"{split}-{number:05}-of-{len(shards):05}.parquet")
    return folder


def splits_of(name, streaming):
    return {
        part.split: [(row["sequence"], row["source_row"]) for row in part.data]
        for part in read_parts(str(name), ["sequence"], streaming=streaming)
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_clones_patterns_and_saved_folders_are_read_with_their_splits(tmp_path, streaming):
    shards = write_shards(tmp_path / "clone" / "data")
    loaded = datasets.DatasetDict({key: Dataset.from_dict({"sequence": [*chain(*SHARDS[key])]}) for key in SHARDS})
    loaded.save_to_disk(str(tmp_path / "saved"))
    loaded["train"].save_to_disk(str(tmp_path / "one"))
    train = [("DDDDD", 1), ("DDDDE", 2), ("DDDDF", 3)]
    whole = {"train": train, "validation": [("CCCCC", 1)], "test": [("NA", 1)]}
    for name in (shards, tmp_path / "clone", shards / "*.parquet", tmp_path / "saved"):
        assert splits_of(name, streaming) == whole, name
    for name in (shards / "train-*", tmp_path / "one"):
        assert [*splits_of(name, streaming).values()] == [train], name
    with pytest.raises(DataError, match="did you mean 'sequence'"):
        read_parts(str(tmp_path / "saved"), ["sequenc"], streaming=streaming)
    for name in ("a1.csv", "a2.csv"):
        write(tmp_path / name, CSV)
    assert [row["source_row"] for row in read_table(str(tmp_path / "a?.csv"), streaming=streaming)] == [2, 3, 5, 6]
    write(shards / "test.csv", CSV)
    assert "test-00000-of-00001.parquet and test.csv are the same split; keep one" in fault(shards)


@pytest.mark.parametrize(("name", "streaming"), [("a.csv", True), ("a.jsonl.gz", False), ("a.parquet", False)])
def test_pipes_and_devices_are_refused_at_once(tmp_path, name, streaming):
    os.mkfifo(tmp_path / name)
    assert "is a named pipe, a socket or a device, not a regular file" in fault(tmp_path / name, streaming=streaming)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert "is a named pipe, a socket or a device, not a regular file" in fault(tmp_path / name, streaming=streaming)


def test_a_record_without_end_is_never_held_whole(tmp_path):
    (tmp_path / "a.csv").write_text('sequence,label\n"' + "a\n" * 100_000)
    assert "Close each quote" in fault(tmp_path / "a.csv")


@pytest.mark.parametrize("content", [b"PAR1" + b"\x15\x04\0" * 50 + b"PAR1", CSV.encode("utf-16"), b"PK\3\4\x14\0\0"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz"])
def test_what_is_no_text_is_said_to_be_none(tmp_path, name, content):
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert "row 1: not UTF-8 text" in fault(tmp_path / name)
    assert "(Excel, zip)" in fault(tmp_path / name)


def test_a_text_over_several_lines_is_read_and_announced(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text('id,note,sequence\nr1,"binds, and\nfolds",MKTVL\nr2,x,MKTAA\nr3,"a\n\nb",MKTCC\n')
    with caplog.at_level(logging.WARNING):
        data = read_table(str(path), ["sequence"])
    assert data["source_row"][:] == [2, 4, 5]
    assert (
        "2 records run over several lines, because a quoted field holds a line end: rows 2 to 3, 5 to 7." in caplog.text
    )


@pytest.mark.parametrize("cell", ["1" * 100_000 + "x", " " * 100_000 + "x" + " " * 20_000 + "y"])
def test_a_long_cell_that_is_no_number_is_refused_in_time(tmp_path, cell):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"sequence": "MKTVL", "label": label}) for label in ("1", "2", cell)))
    with pytest.raises(DataError, match="row 3, column 'label'"):
        load_data(DataArguments(dataset_name=str(path)), output_dir=None, seed=0)


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


def judge(folder, seed: int) -> str:
    """What became of one damaged file."""
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
        return NAMED
    if repr(rows) == repr(table.to_pylist()):
        return RIGHT
    # Without page checksums, a changed number is a number: then pyarrow must see what we see, and no row may be lost.
    assert not form["write_page_checksum"], (seed, kind)
    assert repr(rows) == repr(pq.read_table(path, columns=COLUMNS).to_pylist()), (seed, kind)
    assert len(rows) == NUM_ROWS
    return UNSEEN


def test_damaged_parquet_is_named_or_read_right(tmp_path):
    found = Counter(judge(tmp_path, seed) for seed in range(24))
    assert found[NAMED] >= 8
    assert sum(found.values()) == 24


@pytest.mark.nightly
def test_two_hundred_damaged_parquet_files(tmp_path):
    found = Counter(judge(tmp_path, seed) for seed in range(100, 300))
    assert found[NAMED] > 80


def test_damage_in_a_page_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    form = {"use_dictionary": False, "write_page_checksum": True}
    pq.write_table(make_table(random.Random(0)), path, row_group_size=GROUP_ROWS, **form)
    content = bytearray(path.read_bytes())
    place = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset + 1000  # far behind its header
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: not a readable Parquet file (")
    with pytest.raises(DataError, match="not a readable Parquet"):
        list(read_table(str(path), COLUMNS, streaming=True))


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
