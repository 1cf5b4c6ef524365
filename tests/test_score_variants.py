"""Zero-shot scores are those of a loop over positions; `hf-ext score-variants` writes them."""

import csv

import numpy as np
import pytest
import torch
from commands import score_variants
from tiny_encoders import tiny_esmc
from tiny_t5 import write_t5_encoder
from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM, EsmcTokenizer, EsmForMaskedLM

from hf_ext.baselines import load_masked_lm, score_rows, score_substitutions, zero_shot_table
from hf_ext.errors import ArgumentError, DataError
from hf_ext.property import TASK

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
WILD_TYPE = "MKTAYIAKQRWE"


@pytest.fixture(scope="module")
def models(demo_encoders):
    """Masked language models of three families, with weights that tell residues apart, and their tokenizers."""
    torch.manual_seed(0)
    made = {}
    for folder, head in zip(demo_encoders, (BertForMaskedLM, EsmForMaskedLM)):
        config = AutoConfig.from_pretrained(folder, initializer_range=0.3)
        made[config.model_type] = (head(config).eval(), AutoTokenizer.from_pretrained(folder))
    made["esmc"] = (tiny_esmc().eval(), EsmcTokenizer())
    return made


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """An ESM-2 with its head, saved."""
    path = tmp_path_factory.mktemp("esm")
    for part in models["esm"]:
        part.save_pretrained(path)
    return str(path)


@torch.no_grad()
def by_hand(model, tokenizer, wild_type, masks=True, width=99):
    """One position after the other, as a script of transformers does it."""
    rows = []
    for i in range(len(wild_type)):
        start = min(max(i - width // 2, 0), max(len(wild_type) - width, 0))
        letters = [*wild_type[start : start + width]]
        letters[i - start] = tokenizer.mask_token if masks else wild_type[i]
        text = ("" if "Esm" in type(tokenizer).__name__ else " ").join(letters)
        logits = model(**tokenizer(text, return_tensors="pt")).logits
        assert logits.shape[1] == len(letters) + 2
        found = logits[0, 1 + i - start].log_softmax(-1)
        ids = tokenizer.convert_tokens_to_ids([*LETTERS, wild_type[i]])
        rows.append((found[ids[:-1]] - found[ids[-1]]).numpy())
    return np.array(rows)


def farthest(found, expected):
    return float(np.abs(found - expected).max())


def test_scores_are_those_of_a_loop_over_positions_for_any_batch(models):
    for model, tokenizer in models.values():
        expected = by_hand(model, tokenizer, WILD_TYPE)
        unmasked = by_hand(model, tokenizer, WILD_TYPE, masks=False)
        assert farthest(expected, unmasked) > 0.01
        for tokens in (1, 50, 10_000):
            found = score_substitutions(model, tokenizer, WILD_TYPE, tokens_per_batch=tokens)
            assert (found.shape, found.dtype) == ((12, 20), np.float32)
            assert farthest(found, expected) < 1e-5
        assert farthest(score_substitutions(model, tokenizer, WILD_TYPE, "wild_type"), unmasked) < 1e-5
        own = [LETTERS.index(letter) for letter in WILD_TYPE]
        assert not found[range(12), own].any()


def test_a_long_protein_is_read_in_windows_around_each_position(models):
    for model, tokenizer in models.values():
        for by, masks in (("masked", True), ("wild_type", False)):
            found = score_substitutions(model, tokenizer, WILD_TYPE, by, max_residues=5, tokens_per_batch=20)
            assert farthest(found, by_hand(model, tokenizer, WILD_TYPE, masks, width=5)) < 1e-5
            assert farthest(found, by_hand(model, tokenizer, WILD_TYPE, masks)) > 0.01


def test_a_row_is_the_sum_of_its_substitutions():
    table = np.zeros((3, 20), np.float32)
    table[0, LETTERS.index("G")] = -1.5
    table[2, LETTERS.index("E")] = 0.25
    found = score_rows(table, "ACD", ["ACD", "GCD", "GCE", "AC", "ACX", "ACDE"])
    assert found[:3].tolist() == [0, -1.5, -1.25]
    assert np.isnan(found[3:]).all()
    assert score_rows(table, "ACD", ["A"]).tolist() != [0]


def test_an_encoder_without_its_head_is_refused_by_name_and_has_no_table(models, folder, demo_encoders, tmp_path):
    t5 = write_t5_encoder(tmp_path / "t5")
    for encoder, told in (
        (demo_encoders[0], r"bert' lacks weights: \['cls\.predictions.* saved with its masked head"),
        (demo_encoders[1], r"esm' lacks weights: \['lm_head\.bias.* saved with its masked head"),
        (t5, "type 't5' has no masked head"),
    ):
        with pytest.raises(ArgumentError, match=told):
            load_masked_lm(encoder)
        assert zero_shot_table(encoder, WILD_TYPE) is None
    assert farthest(zero_shot_table(folder, WILD_TYPE), by_hand(*models["esm"], WILD_TYPE)) < 1e-5
    with pytest.raises(ArgumentError, match="no such folder"):  # a mistake is none without a head
        zero_shot_table(str(tmp_path / "none"), WILD_TYPE)


@pytest.fixture
def run(folder, tmp_path):
    """Scores into a folder of this name with the saved ESM-2; its path."""

    def scored(name, *words, encoder=folder, wild_type=WILD_TYPE):
        given = ["--encoder", encoder, "--wild_type", wild_type, "--output", str(tmp_path / name)]
        return score_variants([*given, *words])

    return scored


def read(path):
    with path.open() as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def tables(tmp_path):
    """The same variants as sequences and as substitutions."""
    rows = (("MKTAYIAKQRWE", "WT", 1), ("MKTGYIAKQRWE", "A4G", 3), ("MRTGYIAKQRWE", "K2R, A4G", 2))
    whole = "".join(f"{sequence},{label},=x\n" for sequence, _, label in rows)
    (tmp_path / "whole.csv").write_text(f"protein,y,note\n{whole}MKT,5,=x\n")
    (tmp_path / "short.csv").write_text("variant,y\n" + "".join(f'"{one}",{label}\n' for _, one, label in rows))
    return tmp_path


def test_the_command_writes_every_substitution_a_picture_and_the_scores_of_a_table(run, models, tables, capsys):
    expected = by_hand(*models["esm"], WILD_TYPE)
    out = run("a", "--dataset_name", str(tables / "whole.csv"), "--sequence_column", "protein", "--label_column", "y")
    singles = read(out / "substitutions.csv")
    assert len(singles) == 12 * 20
    for one in (singles[0], singles[107], singles[-1]):
        position = int(one["position"]) - 1
        assert one["wild_type"] == WILD_TYPE[position]
        assert float(one["score"]) == pytest.approx(expected[position, LETTERS.index(one["residue"])], abs=1e-5)
    assert (out / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    rows = read(out / "scores.csv")
    assert [*rows[0]] == ["protein", "y", "note", "source_row", "zero_shot_score"]
    g, r = expected[3, LETTERS.index("G")], expected[1, LETTERS.index("R")]
    assert [float(one["zero_shot_score"]) for one in rows[:3]] == pytest.approx([0, g, g + r], abs=1e-5)
    assert (rows[3]["zero_shot_score"], rows[3]["source_row"]) == ("", "5")
    said = capsys.readouterr().out
    assert "1 of 4 rows have no score" in said
    assert "Spearman with y: " in said
    (tables / "w.fasta").write_text(f">w\n{WILD_TYPE[:7].lower()}\n{WILD_TYPE[7:]}\n")
    words = ["--dataset_name", str(tables / "short.csv"), "--mutation_column", "variant"]
    again = read(run("b", *words, wild_type=str(tables / "w.fasta")) / "scores.csv")
    assert [one["variant"] for one in again] == ["WT", "A4G", "K2R, A4G"]
    assert [one["zero_shot_score"] for one in again] == [one["zero_shot_score"] for one in rows[:3]]


def test_half_precision_and_the_wild_type_as_it_is_give_other_numbers(run):
    scores = {}
    for name, words in {"plain": [], "half": ["--bf16"], "once": ["--by", "wild_type"]}.items():
        scores[name] = np.array([float(one["score"]) for one in read(run(name, *words) / "substitutions.csv")])
    assert 0 < farthest(scores["half"], scores["plain"]) < 0.5 < np.ptp(scores["plain"]) / 20
    assert farthest(scores["once"], scores["plain"]) > 0.01


def test_what_cannot_be_scored_is_refused_with_its_reason(run, tables, demo_encoders):
    whole, short = (["--dataset_name", str(tables / name)] for name in ("whole.csv", "short.csv"))
    (tables / "two.fasta").write_text(">a\nMKT\n>b\nMKV\n")
    column = ["--mutation_column", "variant"]
    for error, told, words, more in (
        (ArgumentError, "saved with its masked head", [], {"encoder": demo_encoders[1]}),
        (ArgumentError, "no sequence of the 20 residues", [], {"wild_type": "MKBT"}),
        (DataError, "holds 2 sequences", [], {"wild_type": str(tables / "two.fasta")}),
        (DataError, "No such file", [], {"wild_type": str(tables / "none.fasta")}),
        (ArgumentError, "not empty", ["--output", str(tables)], {}),
        (ArgumentError, "Columns, and .* are of a table", ["--label_column", "y"], {}),
        (ArgumentError, "a wild type that is looked for, are of a table", [], {"wild_type": "auto"}),
        (DataError, "no protein is found", [*whole, "--sequence_column", "protein"], {"wild_type": "auto"}),
        (ArgumentError, "give one of both", ["--bf16", "--fp16"], {}),
        (ArgumentError, "leave --streaming", [*whole, "--streaming"], {}),
        (DataError, "no column 'sequence'", whole, {}),
        (DataError, "most of its length", [*whole, "--sequence_column", "protein"], {"wild_type": "MKTA"}),
        (DataError, "row 4, column 'variant'.*'K2R': there is 'A'", [*short, *column], {"wild_type": "MAAA"}),
        (DataError, "no column 'absent'", [*short, "--mutation_column", "absent"], {}),
    ):  # fmt: skip
        with pytest.raises(error, match=told):
            run("refused", *words, **more)


def test_a_run_stands_beside_the_zero_shot_scores_in_their_own_order(folder, tmp_path):
    rows = [WILD_TYPE[:i] + new + WILD_TYPE[i + 1 :] for i in range(12) for new in "GPWDHS" if new != WILD_TYPE[i]]
    scores = score_rows(zero_shot_table(folder, WILD_TYPE, by="wild_type"), WILD_TYPE, rows)
    lines = [f"{row},{-score:.6f}" for row, score in zip(rows, scores)]
    (tmp_path / "rows.csv").write_text("\n".join(["sequence,y", *lines]) + "\n")
    words = f"--dataset_name {tmp_path}/rows.csv --label_column y --encoders {folder} --output_dir {tmp_path}/out"
    quick = f"--num_train_epochs 1 --head mlp --head_sizes 8 --use_cpu true --disable_tqdm true --wild_type {WILD_TYPE}"
    found = TASK.main([*words.split(), *quick.split()])["test"]["scores"]
    assert found["zero-shot scores"]["spearman"]["value"] == pytest.approx(-1)  # labels say the opposite
    assert found["ridge on substitutions"]["spearman"]["value"] > 0.5  # which reads them, and learns from labels
