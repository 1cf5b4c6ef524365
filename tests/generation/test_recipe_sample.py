"""recipes/sample.py as users run it: what is in its table and FASTA, what it warns of, and what it refuses."""

import csv
import json
import re
import shutil
from pathlib import Path

import commands
import pytest
import torch
from antibody_examples import heavy, light
from hub_server import serve_hub
from inside import load_generator
from memorising_generator import ANTIGENS, CDR3, make_memorising, save_generator
from tiny_generators import make_generator

from hf_ext.data import EOS_ID, SEP_ID
from hf_ext.errors import ArgumentError, HfExtError
from hf_ext.hub import push_folder

COLUMNS = ["id", "antigen", "source_row", "rank", "heavy", "light", "copies", "log_probability", "valid", "problem"]
LIKELIEST = ("--temperature", "0", "--num_samples", "1")
TOKEN = "hf_" + "canary" * 5 + "bird"


@pytest.fixture(scope="module")
def memorising(tmp_path_factory):
    return save_generator(make_memorising(), tmp_path_factory.mktemp("memorising"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return save_generator(make_generator(), tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="module")
def without_affinities(tmp_path_factory):
    return save_generator(make_generator(label_mean=0.0), tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [f">{name} source=paper\n{one}\n" for name, one in zip(("first", "second"), ANTIGENS)]
    (tmp_path / "antigens.fasta").write_text("".join(records))
    return tmp_path


def sample(model, *given, data="antigens.fasta"):
    """The table's rows after a run."""
    source = ["--dataset_name", data] if data else []
    words = ["--model", str(model), *source, "--max_new_tokens", "260", *map(str, given)]
    output, _ = commands.sample(words)
    with open(output, newline="") as file:
        return list(csv.DictReader(file))


def read_fasta(path="antibodies.fasta"):
    return re.findall(r">(.*)\n(.*)\n", Path(path).read_text())


def test_table_and_fasta_hold_every_antibody_ranked_under_the_antigens_names(memorising):
    rows = sample(memorising, "--num_samples", 10, "--temperature", 1)
    assert [*rows[0]] == [*COLUMNS, "cdr_h3"]
    assert {(row["id"], row["antigen"], row["source_row"]) for row in rows} == {
        ("first", ANTIGENS[0], "1"),
        ("second", ANTIGENS[1], "3"),
    }
    for name in ("first", "second"):
        own = [row for row in rows if row["id"] == name]
        assert sum(int(row["copies"]) for row in own) == 10
        assert [int(row["rank"]) for row in own] == [*range(1, len(own) + 1)]
        order = [(row["valid"] == "no", -float(row["log_probability"])) for row in own]
        assert order == sorted(order)
        assert len(set(order)) > 3
        (known,) = [row for row in own if (row["heavy"], row["light"]) == (heavy(CDR3), light())]
        assert (known["valid"], known["problem"], known["cdr_h3"]) == ("yes", "", CDR3)
    records = read_fasta()
    titles = [title.split()[0] for title, _ in records]
    assert titles[:2] == ["first_1_heavy", "first_1_light"]
    assert len(titles) == len(set(titles))
    assert [chain for _, chain in records] == [one for row in rows for one in (row["heavy"], row["light"]) if one]


def test_what_is_malformed_is_marked_and_kept(untrained, capsys):
    rows = sample(untrained, "--num_samples", 20, "--max_new_tokens", 12)
    assert sum(int(row["copies"]) for row in rows) == 40
    assert {row["valid"] for row in rows} == {"no"}
    assert all(row["problem"] for row in rows)
    cut = [row for row in rows if "cut off" in row["problem"]]
    assert len(cut) > 10
    assert sum("cut off" in title for title, _ in read_fasta()) >= len(cut)
    said = capsys.readouterr().out
    assert f"40 antibodies for 2 antigens: {len(rows)} distinct, 0 with the pattern" in said


def test_duplicates_are_one_line_with_their_number_and_a_collapse_is_named(memorising, capsys):
    rows = sample(memorising, "--num_samples", 4, "--temperature", 0)
    assert [(row["copies"], row["cdr_h3"]) for row in rows] == [("4", CDR3), ("4", CDR3)]
    said = capsys.readouterr().out
    assert "25 % are distinct: the model, or its temperature, collapsed" in said


def test_the_likeliest_antibody_is_no_collapse_and_warned_of_where_antigens_share_it(memorising, folder, capsys):
    rows = sample(memorising, *LIKELIEST)
    assert [(row["copies"], row["cdr_h3"]) for row in rows] == [("1", CDR3), ("1", CDR3)]
    said = capsys.readouterr().out
    assert "collapsed" not in said
    assert "1 antibodies were written for several antigens: it may not read the antigen" in said
    (folder / "copies.csv").write_text(f"antigen\n{ANTIGENS[0]}\n{ANTIGENS[0]}\n")
    sample(memorising, *LIKELIEST, data="copies.csv")
    assert "several antigens" not in capsys.readouterr().out  # the same antigen twice


def test_antigens_are_told_by_id_and_row(memorising, folder):
    (folder / "in.csv").write_text(f"id,antigen\n=1+1,{ANTIGENS[0].lower()}\na b,{ANTIGENS[1]}\na b,{ANTIGENS[1]}\n")
    rows = sample(memorising, *LIKELIEST, data="in.csv")
    assert [(row["id"], row["source_row"]) for row in rows] == [("'=1+1", "2"), ("a b", "3"), ("a b", "4")]
    assert {(row["antigen"], row["heavy"]) for row in rows} == {(one, heavy(CDR3)) for one in ANTIGENS}
    assert [title.split()[0] for title, _ in read_fasta()][::2] == [
        "=1+1_1_heavy",
        "a_b_row3_1_heavy",
        "a_b_row4_1_heavy",
    ]
    (row,) = sample(memorising, "--antigen", ANTIGENS[1].lower(), *LIKELIEST, data=None)
    assert (row["antigen"], row["heavy"]) == (ANTIGENS[1], heavy(CDR3))
    assert read_fasta()[0][0].startswith("row1_1_heavy ")


def test_copies_of_training_antibodies_are_marked(memorising, folder, capsys):
    other = heavy("ARDYSSTW")  # an edit away
    (folder / "train.csv").write_text(f"vh,vl\n{other},{light()}\n{light()},{heavy(CDR3)}\n")
    given = (*LIKELIEST, "--training_data", "train.csv", "--training_columns", "vh", "vl")
    row, _ = sample(memorising, *given)
    names = ("nearest_heavy", "is_copy")
    assert [row[name] for name in names] == [str(1 - 1 / len(other)), "no"]
    assert "training antibodies to the residue" not in capsys.readouterr().out
    (folder / "train.csv").write_text(f"vh,vl\n{other},\n{heavy(CDR3)},{light()}\n")
    row, _ = sample(memorising, *given)
    assert [row[name] for name in names] == ["1.0", "yes"]
    assert "2 lines of the table are training antibodies to the residue" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", ["better", "no better"])
def test_a_discriminator_orders_only_where_its_own_record_says_that_it_is_good(
    untrained, make_affinity, folder, capsys, outcome
):
    model, collator = make_affinity()
    model.save_pretrained("affinity")
    collator.save_pretrained("affinity")
    record = {"verdict": {"outcome": outcome, "text": "No better than a constant."}}
    (folder / "affinity" / "all_results.json").write_text(json.dumps(record))
    rows = sample(untrained, "--num_samples", 9, "--max_new_tokens", 12, "--discriminator", "affinity")
    by_prediction = outcome == "better"
    said = capsys.readouterr().out
    assert ("Ranked by predicted affinity" in said) is by_prediction
    assert ("its own record says: No better than a constant" in said) is not by_prediction
    assert {row["predicted_affinity"] == "" for row in rows if row["light"] == ""} == {True}  # unreadable


def test_a_heavy_chain_alone_is_valid_where_training_had_some(memorising, folder):
    model, _ = load_generator(memorising, device="cpu")
    with torch.no_grad():  # what was <sep> ends the antibody
        model.output.weight[EOS_ID] = model.output.weight[SEP_ID]
        model.output.bias[EOS_ID] = model.output.bias[SEP_ID] + 5
    save_generator(model, folder / "nanobodies")
    (row, _) = sample(folder / "nanobodies", *LIKELIEST)
    assert (row["valid"], row["problem"]) == ("no", "no light chain")
    model.config.needs_light = False
    save_generator(model, folder / "mixed")
    (row, _) = sample(folder / "mixed", *LIKELIEST)
    assert (row["valid"], row["light"], len(read_fasta())) == ("yes", "", 2)


def test_a_pushed_model_is_sampled_by_its_name_with_the_same_outputs(untrained, monkeypatch):
    given = ("--num_samples", 3, "--max_new_tokens", 30)
    expected = sample(untrained, *given)
    with serve_hub(monkeypatch, TOKEN):
        push_folder(untrained, "me/generator", token=TOKEN)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert sample("me/generator", *given) == expected
        with pytest.raises(ArgumentError, match=r"at revision .*did not hand it out"):
            sample("me/generator", *given, "--revision", "v9")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "Name the antigens: either --dataset_name FILE, or --antigen SEQUENCE"),
        (["--dataset_name", "antigens.fasta", "--antigen", "MKT"], "Name the antigens: either"),
        (["--antigen", "MKT", "--id_column", "x"], "--antigen_column and --id_column are for files"),
        (["--antigen", "MK1"], "digit '1' at position 3"),
        (["--antigen", "MKT", "--affinity", "9"], "--affinity 9: this model was trained without affinities"),
        (["--antigen", "MKT", "--model", "no/such"], "Model 'no/such': no folder here, and the Hub did not"),
        (
            ["--antigen", "MKT", "--model", "."],
            r"Model \.: no config.json with a model_type there .* Give the output folder",
        ),
        (["--antigen", "MKT", "--revision", "v1"], "is a folder here, which has no revisions"),
        (["--antigen", "MKT", "--output", "antibodies.fasta"], "is what the FASTA beside it is called"),
        (["--antigen", "MKT", "--training_data", "lost.csv"], "lost.csv: file not found"),
        (["--antigen", "MKT", "--discriminator", "."], "no inputs.json there"),
        (["--dataset_name", "notes.csv"], "no column 'antigen'|antigen"),
        (["--dataset_name", "bad.csv"], "row 3, column 'antigen'"),
        (["--dataset_name", "lost.fasta"], "lost.fasta: file not found"),
        (["--dataset_name", "bad.csv", "--label_column", "pKd"], "unknown argument '--label_column'"),
        (["--antigen", "MKT", "--seed", "-1"], "seed=-1: must be from 0 to"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy_and_nothing_is_written(
    folder, without_affinities, given, words
):
    (folder / "notes.csv").write_text("note\nx\n")
    (folder / "bad.csv").write_text("antigen\nMKT\nMK?\n")
    before = contents(folder)
    with pytest.raises(HfExtError, match=words):
        commands.sample(["--model", str(without_affinities), *given])
    assert contents(folder) == before


def test_unusable_antigens_may_be_left_out_and_are_listed(untrained, folder):
    (folder / "bad.csv").write_text("antigen\nMKT\nMK?\n")
    rows = sample(untrained, "--bad_rows", "drop", "--max_new_tokens", 9, data="bad.csv")
    assert {row["source_row"] for row in rows} == {"2"}
    assert (folder / "antibodies.rejected_rows.csv").read_text().splitlines()[1].startswith("3,antigen,MK?")


def test_what_sample_did_not_write_is_not_replaced_and_what_it_wrote_is(untrained, folder):
    given = ("--num_samples", 1, "--max_new_tokens", 9)
    sample(untrained, *given)
    assert sample(untrained, *given, "--seed", 3)
    (folder / "antigens.csv").write_text("antigen\nMKT\n")
    (folder / "own.fasta").write_text(">mine\nMKT\n")
    (folder / "antibodies.csv").write_text("mine,too\n1,2\n")
    before = contents(folder)
    for output, data, words in (
        ("antibodies.csv", "antigens.fasta", r"is there and was not written by hf-ext sample"),
        ("own.csv", "antigens.fasta", r"is there and was not written by hf-ext sample"),
        ("antigens.csv", "antigens.csv", "would be replaced"),
        ("antigens.csv", "antigens.fasta", r"would be replaced|was not written by hf-ext sample"),
    ):
        with pytest.raises(ArgumentError, match=words):
            sample(untrained, *given, "--output", output, data=data)
    assert contents(folder) == before


def test_a_model_that_is_not_what_was_saved_is_refused(untrained, folder):
    copy = Path(shutil.copytree(untrained, folder / "copy"))
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"is not what was saved: model\.safetensors"):
        sample(copy)


def test_another_kind_of_model_is_refused(make_affinity, folder):
    model, _ = make_affinity()
    model.save_pretrained(folder / "affinity")
    with pytest.raises(ArgumentError, match="is of type 'hf_ext_affinity', not a generator of antibodies"):
        sample(folder / "affinity")
    (folder / "affinity" / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="with a model_type there"):
        sample(folder / "affinity")
