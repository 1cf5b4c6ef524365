import gzip
import json
from itertools import chain

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset
from one_table import read_table

from hf_ext.data.reading import read_parts
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


def test_record_over_two_lines_counts_by_its_first_line(tmp_path):
    path = write(tmp_path / "a.csv", 'sequence,note\nMKTVL,"two\nlines"\nMKTVA,x\n')
    assert read_table(path, ["sequence"])[:] == {"sequence": ["MKTVL", "MKTVA"], "source_row": [2, 4]}


def test_unnamed_index_column_gets_a_name(tmp_path):
    assert read_table(write(tmp_path / "a.csv", ",sequence\n0,MKTVL\n")).column_names[0] == "column_1"


@pytest.mark.parametrize(("suffix", "streaming"), [("fasta", False), ("faa.gz", True)])
def test_fasta_headers_become_columns(tmp_path, suffix, streaming):
    text = "\n>s1 some words pKd=7.3 group=a\nMKT\nVL\n\n>s2 group=b pKd=<=6\nACDEF\n>s3\n\n"
    data = read_table(write(tmp_path / f"a.{suffix}", text), streaming=streaming)
    assert list(data) == [
        {"id": "s1", "pKd": "7.3", "group": "a", "sequence": "MKTVL", "source_row": 2},
        {"id": "s2", "pKd": "<=6", "group": "b", "sequence": "ACDEF", "source_row": 6},
        {"id": "s3", "pKd": None, "group": None, "sequence": "", "source_row": 8},
    ]


def test_a_value_of_a_fasta_header_ends_at_the_next_key_and_the_first_of_a_key_is_kept(tmp_path):
    text = ">sp|P1|A_HUMAN Protein A OS=Homo sapiens OX=9606 EC=3.4.21.4 EC=2.7.1.1 sequence=ok GN=a=b SV=1\nMKTVL\n"
    (row,) = read_table(write(tmp_path / "a.fasta", text))
    assert row == {
        **{"id": "sp|P1|A_HUMAN", "OS": "Homo sapiens", "OX": "9606", "EC": "3.4.21.4", "GN": "a=b", "SV": "1"},
        **{"sequence": "MKTVL", "source_row": 1},
    }


@pytest.mark.parametrize(("name", "streaming"), [("a.jsonl", False), ("a.ndjson.gz", True)])
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


def test_parquet_faults_are_data_errors(tmp_path):
    assert "not a readable Parquet file" in fault(write(tmp_path / "a.parquet", "sequence\nMKTVL\n"))
    pq.write_table(pa.table({"sequence": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert "no records" in fault(str(tmp_path / "b.parquet"))
    pq.write_table(pa.Table.from_arrays([pa.array(["A"]), pa.array(["B"])], ["s", "s"]), tmp_path / "c.parquet")
    assert "column 's' occurs more than once" in fault(str(tmp_path / "c.parquet"))


def test_a_json_list_gives_the_rows_that_json_lines_give(tmp_path):
    rows = [{"antigen": "MKT", "heavy": "EVQ", "pKd": 7.5}, {"antigen": "ACD", "heavy": "QVQ", "pKd": 8}]
    listed = write(tmp_path / "a.json.gz", json.dumps(rows, indent=2))
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_table(listed).to_list() == read_table(lines).to_list()
    assert read_table(listed, ["heavy"]).to_list() == [
        {"heavy": "EVQ", "source_row": 1},
        {"heavy": "QVQ", "source_row": 2},
    ]


OBJECT = '{"sequence": "MKTVL"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.fa", "MKTVL\n>s1\nMKTVL\n", "row 1: FASTA records start with '>'"),
        ("a.jsonl", OBJECT + '{"sequence": }', "row 2: not valid JSON (Expecting value: line 1 column 14"),
        ("a.jsonl", OBJECT + '["MKTVL"]', "row 2: a JSON object such as"),
        ("a.jsonl", OBJECT + '{"s": "A", "s": "B"}', "row 2: not valid JSON (column 's' occurs more than once)"),
        ("a.jsonl", OBJECT + "[" * 100_000, "row 2: not valid JSON"),
        ("a.json", OBJECT, "a list of objects"),
        ("a.json", OBJECT * 2, "name the file .jsonl"),
        ("a.json", '[{"antigen": "MKT"}, "ACD"]', "row 2: a JSON object such as"),
        ("a.json", '[\n{"antigen": },\n]', "line 2 column"),
        ("a.json", "[]", "no records"),
        ("a.csv", "", "the file is empty"),
        ("a.csv", "sequence,label\n", "the file has only a header, no rows"),
        ("a.jsonl", "", "the file has no records"),
        ("a.fasta", "\n", "the file has no records"),
        ("a.csv", "sequence,sequence\nA,B\n", "row 1: column 'sequence' occurs more than once"),
        ("a.csv", "sequence\tlabel\nMKTVL\t1\n", "row 1: the text is tab-separated; save it as"),
        ("a.tsv", CSV, "row 1: the text is comma-separated; save it as .csv with commas, or as .tsv"),
        ("a.csv", "sequence;label\nMKTVL;1,5\n", "row 1: the text is semicolon-separated"),
        ("a.csv", "sep=;\n" + CSV.replace(",", ";"), "row 1: the text is semicolon-separated"),
        ("a.csv", CSV + "MKTVA\n", "the header has 2 fields, but row 4 has 1. Add what is missing"),
        ("a.csv", CSV + "MKTVA,7,5\n", "row 4 has 3. Add what is missing, take out what is too much"),
        ("a.csv", CSV + '"two\nlines",1\nMKTVA\n\nMKTVC,1,2\n', "row 6 has 1, row 8 has 3"),
        ("a.csv", CSV * 3, "row 4, 7: the header again, as joined files have it"),
        ("a.csv", CSV + '"MKTVA,7\nMKTVG,8\n', "row 4 has 1."),
        ("a.csv", "sequence,label\rMKTVL,1\r", "row 1: a line ends in CR alone"),
        ("a.csv", b"sequence,label\nMKTVL,1\nMK\xd1VL,2\n", "row 3: not UTF-8 text (byte 0xd1)"),
        ("a.csv", CSV.encode("utf-16"), "row 1: not UTF-8 text (byte 0xff). Save the file as UTF-8"),
        ("a.csv", gzip.compress(CSV.encode(), mtime=0), "row 1: not UTF-8 text (byte 0x8b)"),
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
    assert "if it is not packed, take .gz off its name" in fault(str(tmp_path / "b.csv.gz"))


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
    assert "val.tsv and valid.csv.gz are the same split; keep one" in fault(str(tmp_path))


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
    with pytest.raises(DataError, match="Did you mean 'sequence'"):
        read_parts(str(tmp_path / "saved"), ["sequenc"], streaming=streaming)
    write(tmp_path / "a1.csv", CSV)
    write(tmp_path / "a2.csv", CSV)
    assert [row["source_row"] for row in read_table(str(tmp_path / "a?.csv"), streaming=streaming)] == [2, 3, 5, 6]
    (shards / "train-00000-of-00002.parquet").unlink()
    assert "of 2 shards train, 0 to 1, there are 1." in fault(str(shards))
    write(shards / "train-00001-of-00002.csv", CSV)  # the second one twice, in place of the first
    assert "of 2 shards train, 0 to 1, there are 1, 1." in fault(str(shards))
    (tmp_path / "a_test").mkdir()
    write(tmp_path / "a_test" / "a1.csv", CSV)
    write(tmp_path / "a_test" / "test.csv", CSV)
    assert "test.csv among files that are no split would be trained on" in fault(str(tmp_path / "a_test" / "*.csv"))


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("Binding data 2024,\n" + CSV, True),
        ('{"Run": "SRR1", "Link": "x"}\n' + CSV, True),
        (" , \n" + CSV, False),
    ],
)
def test_a_header_in_the_second_line_is_found_by_the_columns_asked_for(tmp_path, caplog, text, warns):
    path = write(tmp_path / "a.csv", text)
    for options in ({}, {"streaming": True}, {"reads_all": True}):
        assert [tuple(row.values()) for row in read_table(path, ["sequence", "label"], **options)] == [
            ("MKTVL", "1.5", 3),
            ("NA", "2", 4),
        ]
    assert ("the header is in row 2; what stands before it is passed over" in caplog.text) == warns


def test_a_header_further_down_is_named_and_not_used(tmp_path):
    path = write(tmp_path / "a.csv", "Binding data\n\nof 2024\n" + CSV)
    assert fault(path, ["label"]) == (
        f"{path}: there is no column 'label'. Columns: Binding data. Row 4 has them: sequence, label. Remove the lines "
        "before it."
    )


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
