"""A JSON list of objects as a source: read as JSON Lines are, or refused with what is wrong."""

import gzip
import json
import re

import pytest

from hf_ext.data.reading import read_parts
from hf_ext.errors import DataError

ROWS = [{"antigen": "MKT", "heavy": "EVQ", "pKd": 7.5}, {"antigen": "ACD", "heavy": "QVQ", "pKd": 8}]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_gives_the_rows_that_json_lines_give(tmp_path, indent):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=indent))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (ours,), (lines,) = (read_parts(str(tmp_path / name)) for name in ("rows.json", "rows.jsonl"))
    assert ours.data.to_list() == lines.data.to_list()
    assert ours.data["source_row"][:] == [1, 2]


def test_columns_are_chosen_and_gzip_is_read(tmp_path):
    with gzip.open(tmp_path / "rows.json.gz", "wt") as file:
        json.dump(ROWS, file)
    (part,) = read_parts(str(tmp_path / "rows.json.gz"), ["heavy"])
    assert part.data.to_list() == [{"heavy": "EVQ", "source_row": 1}, {"heavy": "QVQ", "source_row": 2}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"antigen": "MKT"}', "a list of objects"),
        ('{"antigen": "MKT"}\n{"antigen": "ACD"}', "name the file .jsonl"),
        ('[{"antigen": "MKT"}, "ACD"]', "row 2: a JSON object such as"),
        ('[{"antigen": "MKT", "antigen": "ACD"}]', "column 'antigen' occurs more than once"),
        ('[\n{"antigen": },\n]', "line 2 column"),
        ("[]", "no records"),
        ('[{"antigen": "\\ud800"}]', "half of a character"),
    ],
)
def test_what_is_no_list_of_objects_is_refused(tmp_path, text, says):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=re.escape(says)):
        read_parts(str(tmp_path / "rows.json"))
