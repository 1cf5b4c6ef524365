"""`hf-ext predict` writes beside what it read: the input's columns in their order, every value as it stood there."""

import csv
import gzip
import importlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hf_ext.errors import ArgumentError, DataError
from hf_ext.property import write_predictions

ROOT = Path(__file__).resolve().parents[2]
HEADER = "note,antigen,pKd,heavy,light,label\n"
ROWS = [  # small letters, a number with zeros, formulas, quotes, nothing, a line end
    '"a, b",{2},07.50,{0},{1},<=7',
    "=1+1,{2},,{0},{1},x",
    ",{2},-1.5,{0},{1},@SUM(A1)",
]


@pytest.fixture(scope="module")
def model(make_affinity, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, collator = make_affinity()
    model.save_pretrained(folder)
    collator.save_pretrained(folder)
    return folder


@pytest.fixture
def predict(model, tmp_path, monkeypatch):
    """Calls `hf-ext predict` in an empty folder; returns header and rows of its CSV."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)

    def call(name: str, *words: str) -> tuple[list[str], list[list[str]]]:
        given = ["--model", str(model), "--dataset_name", name, "--use_cpu", "true", "--embedding_cache_dir", "cache"]
        path = importlib.import_module("hf_ext.finished.predict").main([*given, "--disable_tqdm", "true", *words])
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        return header, rows

    return call


@pytest.fixture
def table(demo_rows, tmp_path) -> str:
    chains = [demo_rows[name][0] for name in ("heavy", "light", "antigen")]
    chains[0] = chains[0].lower()
    text = HEADER + "".join(row.format(*chains) + "\n" for row in ROWS)
    (tmp_path / "in.csv").write_text(text)
    return "in.csv"


def test_columns_stay_in_order_with_their_values_and_the_new_ones_follow(predict, table, demo_rows):
    header, rows = predict(table)
    heavy, light, antigen = (demo_rows[name][0] for name in ("heavy", "light", "antigen"))
    assert header == ["note", "antigen", "pKd", "heavy", "light", "label", "source_row", "prediction"]
    assert [row[:7] for row in rows] == [
        ["a, b", antigen, "07.50", heavy.lower(), light, "<=7", "2"],
        ["'=1+1", antigen, "", heavy.lower(), light, "x", "3"],  # as a spreadsheet may open it
        ["", antigen, "-1.5", heavy.lower(), light, "'@SUM(A1)", "4"],
    ]
    assert len({row[7] for row in rows}) == 1  # the same sequences
    float(rows[0][7])


def test_the_same_command_again_replaces_its_predictions(predict, table):
    """Also where the input has a column `label`, as the predictions of a run have."""
    assert predict(table) == predict(table)


def test_without_them_the_columns_are_those_that_the_model_reads(predict, table):
    Path(table).write_text(Path(table).read_text().replace("note,", "+note,", 1))
    header, rows = predict(table, "--keep_columns", "false", "--id_column=+note")
    assert header == ["heavy", "light", "antigen", "'+note", "source_row", "prediction"]
    assert rows[1][3] == "'=1+1"
    assert rows[0][0].isupper()


def test_a_column_that_would_be_there_twice_is_refused_with_the_way_out(predict, table):
    Path(table).write_text(Path(table).read_text().replace("note,", "source_row,", 1).replace("pKd", "prediction"))
    with pytest.raises(DataError, match=r"in\.csv has columns of the names source_row, prediction, .*--keep_columns"):
        predict(table)
    assert not Path("predictions.csv").exists()
    assert predict(table, "--keep_columns", "false")[0][-2:] == ["source_row", "prediction"]


def test_rows_that_are_left_out_take_their_values_along(predict, table):
    text = Path(table).read_text().splitlines()
    broken = text[2].replace("=1+1", "bad").replace(text[2].split(",")[3], "EV1QL")
    Path(table).write_text("\n".join([text[0], text[1], broken, text[3]]) + "\n")
    _, rows = predict(table, "--bad_rows", "drop")
    assert [(row[0], row[6]) for row in rows] == [("a, b", "2"), ("", "4")]


def test_in_blocks_rows_left_out_refusals_and_predictions_are_those_of_the_whole_table(predict, demo_rows, monkeypatch):
    chains = [*zip(*(demo_rows[name][:7] for name in ("heavy", "light", "antigen")))]
    lines = [f"n{i},{','.join(row)}" for i, row in enumerate([*chains, chains[1]])]
    for bad in (2, 5):
        lines[bad] = lines[bad].replace(",", ",?", 1)
    Path("in.csv").write_text("\n".join(["name,heavy,light,antigen", *lines]) + "\n")
    words = ("in.csv", "--bad_rows", "drop")
    header, whole = predict(*words)
    rejected = Path("predictions.rejected_rows.csv").read_text()
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 2)
    again, rows = predict(*words, "--embedding_cache_dir", "other")
    assert (again, [row[:-1] for row in rows]) == (header, [row[:-1] for row in whole])
    assert [float(row[-1]) for row in rows] == pytest.approx([float(row[-1]) for row in whole], rel=1e-5)
    assert len({row[-1] for row in rows}) > 3
    assert Path("predictions.rejected_rows.csv").read_text() == rejected
    with pytest.raises(DataError, match="2 values cannot be used"):
        predict("in.csv")
    monkeypatch.setattr("hf_ext.finished.prediction.iter_blocks", lambda table: [table.select(range(1, 6))])
    assert [row[:-1] for row in predict(*words)[1]] != [row[:-1] for row in whole]


def test_blocks_are_written_as_they_come_and_the_file_appears_with_the_last(tmp_path):
    path = tmp_path / "out.csv"
    sizes = []

    def blocks(*starts):
        for start in starts:
            sizes.append(sum(one.stat().st_size for one in tmp_path.iterdir()))
            assert not path.exists()
            yield Dataset.from_dict({"source_row": range(start, start + 3000)}), {"prediction": np.zeros(3000)}, None

    with pytest.raises(TypeError):
        write_predictions(path, blocks(0, 3000, "late"))
    assert not [*tmp_path.iterdir()]
    assert write_predictions(path, blocks(0, 3000, 6000)) == 9000
    assert 0 == sizes[-3] < sizes[-2] < sizes[-1]
    assert path.read_text().split() == ["source_row,prediction", *(f"{i},0.0" for i in range(9000))]


def test_files_of_a_folder_follow_each_other_with_the_columns_of_both(predict, demo_rows, tmp_path, monkeypatch):
    """Row numbers begin anew in each file: a value never goes to the row of that number in another file."""
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 1)
    folder = tmp_path / "parts"
    folder.mkdir()
    chains = {name: demo_rows[name][:4] for name in ("heavy", "light", "antigen")}
    unreadable = {"heavy": "?"}

    def write(name, picked, extra):
        rows = [{**{c: v[i] for c, v in chains.items()}, **extra(i), **(unreadable if i == 1 else {})} for i in picked]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", (0, 1), lambda i: {"where": f"train {i}"})
    write("test.jsonl", (1, 2, 3), lambda i: {"where": f"test {i}", "score": i + 0.5, "more": [i]})
    header, rows = predict("parts", "--bad_rows", "drop")
    assert header[3:7] == ["where", "score", "more", "source_row"]
    assert [row[3:7] for row in rows] == [
        ["train 0", "", "", "1"],
        ["test 2", "2.5", "[2]", "2"],
        ["test 3", "3.5", "[3]", "3"],
    ]


def test_a_name_that_ends_in_gz_is_gzip_and_read_again(predict, table):
    header, rows = predict(table)
    packed = Path("out.csv.gz")
    for _ in range(2):  # the second replaces its own
        with pytest.raises(UnicodeDecodeError):  # it is no text
            predict(table, "--output", "out.csv.gz")
        assert [*csv.reader(gzip.decompress(packed.read_bytes()).decode().splitlines())] == [header, *rows]
    packed.write_text("source_row,prediction\n1,2\n")  # text under that name is not ours
    with pytest.raises(ArgumentError, match="was not written by hf-ext predict"):
        predict(table, "--output", "out.csv.gz")


def test_predictions_of_a_folder_are_scored_as_those_of_its_model(predict, demo_rows, model, tmp_path):
    names = ["heavy", "light", "antigen"]
    for part, first in (("train", 0), ("test", 4)):
        lines = [",".join((*(demo_rows[name][i] for name in names), f"{i}.5")) for i in range(first, first + 4)]
        (tmp_path / "parts").mkdir(exist_ok=True)
        (tmp_path / "parts" / f"{part}.csv").write_text("\n".join(["heavy,light,antigen,pKd", *lines]))
    header, rows = predict("parts")
    assert [row[4] for row in rows] == 2 * ["2", "3", "4", "5"]
    words = ["--dataset_name", "parts", "--label_column", "pKd", "--sequence_columns", *names, "--use_cpu", "true"]
    words += ["--embedding_cache_dir", "cache", "--models", str(model), "predictions.csv"]
    found = importlib.import_module("hf_ext.finished.evaluate").main(words)
    rmse = [one["rmse"]["value"] for one in found["scores"].values()]
    assert (found["num_rows"], rmse[0]) == (8, pytest.approx(rmse[1], rel=1e-5))
    Path("predictions.csv").write_text("\n".join(map(",".join, [header, *rows[4:], *rows[:4], rows[0]])))
    with pytest.raises(DataError, match="source_row does not tell rows apart"):
        importlib.import_module("hf_ext.finished.evaluate").main(words)


def test_numbers_of_parquet_are_written_as_python_writes_them(predict, demo_rows):
    rows = {name: demo_rows[name][:2] for name in ("heavy", "light", "antigen")}
    pq.write_table(pa.table({**rows, "count": [3, None], "share": [0.1, 1e-30], "sure": [True, False]}), "in.parquet")
    header, found = predict("in.parquet")
    assert header[3:] == ["count", "share", "sure", "source_row", "prediction"]
    assert [row[3:6] for row in found] == [["3", "0.1", "True"], ["", "1e-30", "False"]]


def test_a_stream_has_no_columns_to_keep(predict, table):
    header, rows = predict(table, "--streaming", "true")
    assert (header, len(rows)) == (["prediction"], 3)
    with pytest.raises(ArgumentError, match="written by hf-ext predict"):  # another program may have such a column
        predict(table)
    with pytest.raises(ArgumentError, match="it could not be told which rows were left out"):
        predict(table, "--streaming", "true", "--bad_rows", "drop")


def test_annotations_below_sequences_are_refused_not_predicted(predict, demo_rows):
    heavy, light, antigen = (demo_rows[name][0] for name in ("heavy", "light", "antigen"))
    chains = f"heavy={heavy} light={light} antigen={antigen}"
    Path("in.fasta").write_text(f">P1 {chains}\nMKTAYIAKQR\nSSSSSLLLLL\n")
    with pytest.raises(DataError, match=r"in.fasta, row 1: below the sequence stand as many .* \(SSSSSLLLLL\)"):
        predict("in.fasta")
    Path("in.fasta").write_text(f">P1 {chains}\nMKTAYIAKQR\nMKTAY\n")
    assert predict("in.fasta")[1][0][4] == "MKTAYIAKQRMKTAY"
    Path("in.csv").write_text(f"heavy,light,antigen\n{heavy},{light},MdEvVpLqKl\n")
    with pytest.raises(DataError, match=r"in.csv, row 2, column 'antigen'.* 3Di states"):
        predict("in.csv")
