"""Rows of a stage: split by antigen, filtered in training alone, limited, counted; and the demo's planted rule."""

import json

import pytest
from datasets import Dataset

from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import RULE, answer_epitope, make_demo_pairs
from hf_ext.errors import ArgumentError, DataError
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.preparing import load_pairs, settle_columns


def make_table(num_antigens: int = 20, per_antigen: int = 5) -> Dataset:
    """pKd are 5, 6, 7, 8 and 9 for each antigen."""
    table = make_demo_pairs(num_antigens)
    rows = [{**table[i], "pKd": 5.0 + j} for i in range(num_antigens) for j in range(per_antigen)]
    return Dataset.from_list(rows)


def load(tmp_path, *, table=None, explicit=(), data=None, name=None, **given):
    args, data_args = GeneratorArguments(**given), DataArguments(dataset_name=name, **(data or {}))
    settle_columns(args, data_args, {*explicit})
    table = make_table() if table is None and name is None else table
    return load_pairs(args, data_args, {*explicit}, output_dir=tmp_path, seed=0, table=table)


def test_antigens_are_split_and_a_split_of_rows_that_the_user_asked_for_is_warned_of(tmp_path):
    data = load(tmp_path)
    antigens = {name: {*rows["antigen"]} for name, rows in data.splits.items()}
    assert not antigens["train"] & (antigens["test"] | antigens["validation"])
    assert {name: len(found) for name, found in antigens.items()} == data.report["num_antigens"]
    assert any("split by antigen" in note for note in data.report["notes"])
    assert data.report["warnings"] == []
    data = load(tmp_path, data={"split": "random"})
    assert any("have an antigen that is trained on" in warning for warning in data.report["warnings"])
    assert data.report["leaks"]["columns"]["antigen"]["num_test_sequences_in_train"] > 0


def test_training_rows_alone_are_filtered_and_then_limited_and_that_is_said(tmp_path):
    labelled = {"explicit": {"label_column"}, "data": {"label_column": "pKd"}}
    data = load(tmp_path, min_affinity=7.0, **labelled)
    assert {*data.affinities("train")} == {8.0, 9.0}
    assert {*data.affinities("test")} == {5.0, 6.0, 7.0, 8.0, 9.0}
    assert any("trained on the 32 of 80 training rows above 7" in note for note in data.report["notes"])
    labelled["data"]["max_train_samples"] = 20
    few = load(tmp_path, min_affinity=7.0, max_validation_samples=3, **labelled)
    assert few.report["sizes"] == {"train": 20, "validation": 3, "test": 10}
    assert min(few.affinities("train")) > 7
    assert sum("a random" in note for note in few.report["notes"]) == 2
    unknown = load(tmp_path, min_affinity=7.0)
    assert unknown.affinities("train") is None
    assert len(unknown.splits["train"]) == 80
    assert any("--min_affinity 7 is off" in note for note in unknown.report["notes"])


def test_a_filter_that_leaves_nothing_or_one_affinity_is_refused_and_bounds_are_warned_of(tmp_path):
    given = {"explicit": {"label_column"}, "data": {"label_column": "pKd"}}
    with pytest.raises(DataError, match="leaves 0 of 80 training rows, whose largest label is 9"):
        load(tmp_path, min_affinity=9.5, **given)
    with pytest.raises(DataError, match="all 16 training labels are 9, so there is nothing to learn"):
        load(tmp_path, min_affinity=8.5, **given)
    rows = [{**row, "pKd": f">{row['pKd']:g}" if row["pKd"] == 9 else f"{row['pKd']:g}"} for row in make_table()]
    Dataset.from_list(rows).to_csv(tmp_path / "bounds.csv", index=False)
    data = load(tmp_path, name=str(tmp_path / "bounds.csv"), **given)
    assert any("16 of 80 training labels are bounds (<, >)" in warning for warning in data.report["warnings"])


def test_intervals_resample_clusters_or_groups_of_antigens_where_each_has_one(tmp_path):
    def find_column(**given):
        data = load(tmp_path, **given)
        return data.find_units(data.antibodies("test").antigens).column

    assert find_column() == "antigen"
    assert find_column(data={"split": "cluster", "cluster_identity": 0.95}, table=make_table(60, 1)) == "cluster"
    rows = [{**row, "family": str(i % 20)} for i, row in enumerate(make_table(40, 1))]
    assert find_column(table=Dataset.from_list(rows), data={"group_column": "family"}) == "family"
    twice = [{**row, "family": str(i)} for i, row in enumerate([*rows, *rows])]
    assert find_column(table=Dataset.from_list(twice), data={"group_column": "family"}) == "antigen"


def test_pairs_come_from_json_lists_and_fasta_headers_alike(tmp_path):
    pairs = [("MKTAYIAK", "EVQLVES", "DIQMTQ"), ("GGSWLLPK", "QVQLQES", "SYELTQ")]
    pairs += [("ACDEFGHI", "QVKLEES", "EIVLTQ"), ("KLMNPQRS", "EVKLVES", "DIVMTQ")]
    records = [f">{i} antigen={antigen} light={vl}\n{vh}\n" for i, (antigen, vh, vl) in enumerate(pairs)]
    (tmp_path / "pairs.fasta").write_text("".join(records))
    (tmp_path / "pairs.json").write_text(json.dumps([dict(zip(("ag", "vh", "vl"), one)) for one in pairs]))
    fasta = load(tmp_path, name=str(tmp_path / "pairs.fasta"), heavy_column="sequence")
    named = {"antigen_column": "ag", "heavy_column": "vh", "light_column": "vl"}
    listed = load(tmp_path, name=str(tmp_path / "pairs.json"), **named)
    for split in ("train", "validation", "test"):
        assert fasta.antibodies(split) == listed.antibodies(split)


def test_heavy_chains_alone_and_rows_without_a_light_chain(tmp_path):
    assert {*load(tmp_path, light_column="").antibodies("train").light} == {None}
    table = make_table().to_list()
    mixed = Dataset.from_list([{**row, "light": "" if i % 5 == 0 else row["light"]} for i, row in enumerate(table)])
    data = load(tmp_path, table=mixed, may_lack_light=True)
    assert None in data.antibodies("train").light
    assert not data.needs_light
    assert data.report["missing_chains"]["light"]["train"] == 16
    with pytest.raises(DataError, match="light"):
        load(tmp_path, table=mixed)


@pytest.mark.parametrize(
    ("explicit", "data", "says"),
    [
        ({"sequence_columns"}, {}, "give --antigen_column, --heavy_column and --light_column"),
        ({"missing_chains"}, {}, "--may_lack_light"),
        ((), {"streaming": True}, "are read at once"),
        ((), {"too_long": "truncate"}, "only error is allowed"),
    ],
)
def test_what_a_generator_cannot_do_with_data_is_refused(tmp_path, explicit, data, says):
    with pytest.raises(ArgumentError, match=says):
        load(tmp_path, explicit=explicit, data=data)


def test_bad_rows_are_named_with_row_and_column(tmp_path):
    table = make_table(20, 1).to_list()
    table[3]["heavy"] = "EVQ1"
    with pytest.raises(DataError, match="row 4, column 'heavy'"):
        load(tmp_path, table=Dataset.from_list(table))
    data = load(tmp_path, table=Dataset.from_list(table), data={"bad_rows": "drop"})
    assert data.report["rows_rejected"] == 1
    assert (tmp_path / "rejected_rows.csv").is_file()


def test_the_planted_rule_is_what_the_demo_says():
    table = make_demo_pairs(50)
    assert answer_epitope("KGNL") == "DEWYHQTV"
    for row in table:
        sites = row["antigen"][12:24:3]
        assert row["antigen"][12:24] == "".join(3 * site for site in sites)
        assert f"CAR{answer_epitope(sites)}DYWGQGT" in row["heavy"]
    assert len({*table["antigen"]}) == len({*table["heavy"]}) == 50
    assert len(RULE) ** 4 == 1296


def test_a_file_of_heavy_chains_alone_names_the_option(tmp_path):
    make_table().remove_columns("light").to_csv(tmp_path / "heavy.csv", index=False)
    with pytest.raises(DataError, match=r"no column 'light'. Of heavy chains alone: --light_column ''"):
        load(tmp_path, name=str(tmp_path / "heavy.csv"))
    assert load(tmp_path, name=str(tmp_path / "heavy.csv"), light_column="").light is None
