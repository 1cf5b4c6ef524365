import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset
from one_table import read_table

from hf_ext.data.sources import read_parts
from hf_ext.errors import DataError

CSV = "sequence,label\nMKTVL,1.5\nNA,2\n"
ROWS = {"sequence": ["MKTVL", "NA"], "label": ["1.5", "2"], "source_row": [2, 3]}


def write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


def fault(name, columns=None, **kwargs):
    with pytest.raises(DataError) as error:
        list(read_table(name, columns, **kwargs))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("a.csv.gz", CSV),
        ("a.CSV", CSV),
        ("a.tsv", CSV.replace(",", "\t")),
        ("a.tsv.gz", CSV.replace(",", "\t")),
        ("bom.csv", "\ufeff" + CSV),
        ("crlf.csv", CSV.replace("\n", "\r\n")),
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


def test_record_over_two_lines_counts_by_its_first_line(tmp_path):
    path = write(tmp_path / "a.csv", 'sequence,note\nMKTVL,"two\nlines"\nMKTVA,x\n')
    assert read_table(path, ["sequence"])[:] == {"sequence": ["MKTVL", "MKTVA"], "source_row": [2, 4]}


def test_unnamed_index_column_gets_a_name(tmp_path):
    assert read_table(write(tmp_path / "a.csv", ",sequence\n0,MKTVL\n")).column_names[0] == "column_1"


@pytest.mark.parametrize("suffix", ["fasta", "fa", "faa", "fasta.gz"])
@pytest.mark.parametrize("streaming", [False, True])
def test_fasta_headers_become_columns(tmp_path, suffix, streaming):
    text = "\n>s1 pKd=7.3 group=a some words\nMKT\nVL\n\n>s2 group=b pKd=<=6\nACDEF\n>s3\n\n"
    data = read_table(write(tmp_path / f"a.{suffix}", text), streaming=streaming)
    assert list(data) == [
        {"id": "s1", "pKd": "7.3", "group": "a", "sequence": "MKTVL", "source_row": 2},
        {"id": "s2", "pKd": "<=6", "group": "b", "sequence": "ACDEF", "source_row": 6},
        {"id": "s3", "pKd": None, "group": None, "sequence": "", "source_row": 8},
    ]


def test_fasta_faults_name_the_row(tmp_path):
    assert "row 1: FASTA records start with '>'" in fault(write(tmp_path / "a.fa", "MKTVL\n>s1\nMKTVL\n"))
    assert "row 3: column 'g' occurs more than once" in fault(write(tmp_path / "b.fa", ">s g=1\nMK\n>t g=1 g=2\nMK\n"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson"])
@pytest.mark.parametrize("streaming", [False, True])
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sequence": }', "row 2: not valid JSON (Expecting value at character 14)"),
        ('["MKTVL"]', "row 2: a JSON object such as"),
        ('{"sequence": "A", "sequence": "B"}', "row 2: column 'sequence' occurs more than once"),
        ("[" * 100_000, "row 2: the JSON cannot be read"),
        ('{"label": ' + "9" * 5000 + "}", "row 2: "),
    ],
)
def test_json_faults_name_the_row(tmp_path, line, message):
    assert message in fault(write(tmp_path / "a.jsonl", f'{{"sequence": "MKTVL"}}\n{line}\n'))


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_keeps_types_and_counts_records(tmp_path, streaming):
    table = pa.table({"sequence": pa.array(["MKTVL", "nan"]).dictionary_encode(), "label": [1.5, None], "n": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = read_table(str(tmp_path / "a.parquet"), ["sequence", "label"], streaming=streaming)
    assert list(data) == [
        {"sequence": "MKTVL", "label": 1.5, "source_row": 1},
        {"sequence": "nan", "label": None, "source_row": 2},
    ]


def test_parquet_faults_are_data_errors(tmp_path):
    assert "not a readable Parquet file" in fault(write(tmp_path / "a.parquet", "sequence\nMKTVL\n"))
    pq.write_table(pa.table({"sequence": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert "no records" in fault(str(tmp_path / "b.parquet"))
    pq.write_table(pa.Table.from_arrays([pa.array(["A"]), pa.array(["B"])], ["s", "s"]), tmp_path / "c.parquet")
    assert "column 's' occurs more than once" in fault(str(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "\n \n", "the file is empty"),
        ("a.csv", "sequence,label\n", "the file has only a header, no rows"),
        ("a.jsonl", "", "the file has no records"),
        ("a.fasta", "\n", "the file has no records"),
        ("a.csv", "sequence,sequence\nA,B\n", "row 1: column 'sequence' occurs more than once"),
        ("a.csv", "sequence\tlabel\nMKTVL\t1\n", "row 1: the text is tab-separated; save it as .tsv"),
        ("a.tsv", CSV, "row 1: the text is comma-separated; save it as .csv"),
        ("a.csv", "sequence;label\nMKTVL;1,5\n", "row 1: the text is semicolon-separated"),
        ("a.csv", CSV + "MKTVA\n", "row 4: 1 fields where the header has 2. Add the missing ones"),
        ("a.csv", CSV + "MKTVA,7,5\n", "row 4: 3 fields where the header has 2. Remove the extra ones"),
        ("a.csv", "sequence,label\nMKTVL,1\n\nMKTVA,2\n", "row 3: blank line between rows"),
        ("a.csv", CSV + '"MKTVA,7\nMKTVG,8\n', "row 4: unexpected end of data. Look for a quote"),
        ("a.csv", "sequence,label\rMKTVL,1\r", "Look for a quote that is opened and never closed, or for line ends"),
        ("a.csv", b"sequence,label\nMKTVL,1\nMK\xd1VL,2\n", "row 3: not UTF-8 (byte 0xd1 at byte 3 of the line)"),
        ("a.csv", CSV.encode("utf-16"), "not UTF-8 but UTF-16"),
        ("a.csv", gzip.compress(CSV.encode(), mtime=0), "the file is gzip-compressed; add .gz to its name"),
    ],
)
def test_structural_fault_names_file_and_row(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert message in fault(path)
    assert message in fault(path, streaming=True)
    assert fault(path).startswith(path)


def test_missing_column_lists_the_columns_and_the_nearest(tmp_path):
    path = write(tmp_path / "a.csv", CSV)
    assert fault(path, ["sequense"]) == (
        f"{path}: there is no column 'sequense'. Did you mean 'sequence'? Columns: sequence, label."
    )
    path = write(tmp_path / "a.jsonl", '{"sequence": "MKTVL"}\n')
    assert "there is no column 'pKd'. Columns: sequence" in fault(path, ["pKd"])
    assert "there is no column 'pKd'. Columns: " in fault(path, ["pKd"], streaming=True)


@pytest.mark.parametrize("cut", [5, 300])
def test_truncated_gzip_is_named(tmp_path, cut):
    data = gzip.compress(b"sequence\n" + b"".join(b"MKTVL%d\n" % i for i in range(5000)), compresslevel=1)
    (tmp_path / "a.csv.gz").write_bytes(data[:cut])
    assert "the gzip data is damaged or cut off after row" in fault(str(tmp_path / "a.csv.gz"))
    (tmp_path / "b.csv.gz").write_text(CSV)
    assert "Remove .gz from its name." in fault(str(tmp_path / "b.csv.gz"))


def test_file_not_found_names_the_nearest_files(tmp_path):
    write(tmp_path / "binders.csv", CSV)
    write(tmp_path / "other.txt", CSV)
    assert "file not found. Nearest names there: binders.csv." in fault(str(tmp_path / "binder.csv"))
    assert "file not found. Tables there: binders.csv." in fault(str(tmp_path / "zzz.parquet"))
    assert f"there is no folder {tmp_path / 'no'}" in fault(str(tmp_path / "no" / "a.csv"))
    assert "other.txt: unknown format. Use .csv" in fault(str(tmp_path / "other.txt"))


def test_folder_gives_its_train_validation_and_test_files(tmp_path):
    write(tmp_path / "test.csv", "sequence\nAAAAA\n")
    write(tmp_path / "valid.csv.gz", "sequence\nCCCCC\n")
    write(tmp_path / "train.csv", "sequence\nDDDDD\n")
    write(tmp_path / "README.md", "text")
    parts = read_parts(str(tmp_path))
    assert [(part.split, part.data["sequence"][:]) for part in parts] == [
        ("train", ["DDDDD"]),
        ("validation", ["CCCCC"]),
        ("test", ["AAAAA"]),
    ]
    assert read_table(str(tmp_path))["sequence"][:] == ["DDDDD", "CCCCC", "AAAAA"]
    write(tmp_path / "val.tsv", "sequence\nCCCCC\n")
    assert "both val.tsv and valid.csv.gz are validation files" in fault(str(tmp_path))


def test_folder_without_train_file_says_what_it_holds(tmp_path):
    write(tmp_path / "data.csv", CSV)
    assert "no train file (train.csv, train.parquet, ...) in this folder. It holds: data.csv." in fault(str(tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_splits_gives_numbered_parts(tmp_path, monkeypatch, streaming):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split, sequence in (("train", "DDDDD"), ("validation", "CCCCC"), ("test", "NA")):
        pq.write_table(pa.table({"sequence": [sequence], "n": [1]}), folder / f"{split}.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    from hf_ext.data.sources import _read_hub

    parts = _read_hub(str(folder), ["sequence"], None, None, streaming)
    assert [(part.split, list(part.data)) for part in parts] == [
        ("train", [{"sequence": "DDDDD", "source_row": 1}]),
        ("validation", [{"sequence": "CCCCC", "source_row": 1}]),
        ("test", [{"sequence": "NA", "source_row": 1}]),
    ]
    with pytest.raises(DataError, match="Did you mean 'sequence'"):
        _read_hub(str(folder), ["sequenc"], None, None, streaming)


def test_stream_resumes_where_its_state_was_saved(tmp_path):
    path = write(tmp_path / "a.csv", "sequence\n" + "".join(f"M{'K' * i}\n" for i in range(6)))
    data = read_table(path, streaming=True)
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    state = data.state_dict()
    again = read_table(path, streaming=True)
    again.load_state_dict(state)
    assert [row["source_row"] for row in again] == [5, 6, 7]
