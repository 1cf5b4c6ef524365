"""`--objective likelihood`: scores of variants, how they learn an order, what is kept of them, and what is refused."""

import copy
import csv
import json
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from protein_families import write_family
from scipy.stats import spearmanr
from transformers import AutoModelForMaskedLM, AutoTokenizer, EsmModel

from hf_ext import AffinityPredictor, merged_copy
from hf_ext.checkpoints import save_weights
from hf_ext.data import DataArguments
from hf_ext.errors import ArgumentError, DataError
from hf_ext.finished import export
from hf_ext.heads import set_wild_type
from hf_ext.models import AffinityModel, LoraSettings, TowerSpec, read_encoder
from hf_ext.property import TASK, build_collator, load_model

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
WILD = "MKTAYIAKQRQISFVK"
HYDROPHOBIC = {*"AFILMVWY"}


def make_variants(number=60, seed=0):
    """One to three substitutions; a label is how many residues are hydrophobic, with a little noise."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(number):
        letters = [*WILD]
        for place in generator.choice(len(WILD), 1 + i % 3, replace=False):
            letters[place] = LETTERS[generator.integers(20)]
        sequence = "".join(letters)
        label = sum(letter in HYDROPHOBIC for letter in sequence) + generator.normal(0, 0.1)
        rows.append({"sequence": sequence, "y": round(float(label), 3), "part": ("train", "valid", "test")[i % 3]})
    return rows


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Masked language models, whose small random weights are made larger: scores are then of some size."""
    root = tmp_path_factory.mktemp("encoders")
    found = {}
    for name in ("esm", "bert"):
        found[name] = write_family(name, root)
        model = AutoModelForMaskedLM.from_pretrained(found[name])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(10)
        save_weights(model, Path(found[name]))
    return found


def make_model(folder, training="full"):
    torch.manual_seed(0)
    spec = read_encoder(folder, None, training, LoraSettings(), masked_head=True)
    model = AffinityModel.from_encoders(
        [spec], [TowerSpec(0, [["sequence"]])], head_form="likelihood", head_sizes=[], loss="ranking"
    )
    collator = build_collator(model, DataArguments())
    set_wild_type(model, collator, WILD)
    model.fit_scaling(5.0, 2.0, {})
    return model, collator


@torch.no_grad()
def score_by_hand(folder, sequences):
    """What transformers gives for the wild type alone, log p(residue) - log p(its own), position by position."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    is_spaced = "Bert" in type(tokenizer).__name__
    ids = tokenizer(" ".join(WILD) if is_spaced else WILD, return_tensors="pt")
    table = AutoModelForMaskedLM.from_pretrained(folder).eval()(**ids).logits[0, 1:-1].log_softmax(-1)
    assert len(table) == len(WILD)
    token = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS}
    return [
        sum(float(table[i, token[a]] - table[i, token[b]]) for i, (a, b) in enumerate(zip(one, WILD)) if a != b)
        for one in sequences
    ]


@pytest.mark.parametrize("family", ["esm", "bert"])
def test_before_a_step_a_score_is_a_sum_of_log_softmax_entries_in_a_batch_or_alone(family, folders):
    model, collator = make_model(folders[family])
    sequences = [WILD, *(row["sequence"] for row in make_variants(8))]
    expected = score_by_hand(folders[family], sequences)
    rows = [{"sequence": one} for one in sequences]
    predictor = AffinityPredictor(model, collator, device="cpu")
    found = predictor.predict(rows)
    assert found[0] == 0
    assert np.std(expected) > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose([predictor.predict([row])[0] for row in rows], expected, atol=1e-5)
    collator.tokenizers["sequence"].pad_to_multiple_of = 32
    np.testing.assert_allclose(predictor.predict(rows), expected, atol=1e-5)
    others = score_by_hand(folders[family], [one[::-1] for one in sequences])  # a broken twin: other substitutions
    assert np.abs(np.array(others) - found).max() > 0.05


def test_the_loss_is_that_of_all_pairs_and_of_the_order_of_labels_alone(folders):
    model, collator = make_model(folders["esm"])
    rows = [{"sequence": row["sequence"]} for row in make_variants(3)]
    batch = collator(rows)
    first, second, third = model.eval()(**batch).logits.tolist()

    def loss(*labels):
        return model(**batch, labels=torch.tensor(labels)).loss.item()

    pairs = [np.log1p(np.exp(low - high)) for high, low in ((third, first), (third, second), (first, second))]
    # Of each row the mean over its pairs, halved; then the mean over rows.
    by_row = [pairs[0] + pairs[2], pairs[1] + pairs[2], pairs[0] + pairs[1]]
    assert loss(2.0, 1.0, 3.0) == pytest.approx(sum(by_row) / 2 / 2 / 3, abs=1e-6)
    assert loss(2.0, 1.0, 3.0) == loss(-1.0, -90.0, 0.5)
    assert loss(2.0, 1.0, 3.0) != pytest.approx(loss(1.0, 2.0, 3.0), abs=1e-3)
    assert loss(1.0, 1.0, 1.0) == 0  # where no order is known


def learn(model, collator, rows, labels, steps=25):
    """Spearman on `rows` after some steps on all of them."""
    batch = collator([{"sequence": row["sequence"]} for row in rows])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        model.train()(**batch, labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = np.array([row["y"] for row in rows])
    return spearmanr(model.eval()(**batch).logits.detach(), truth).statistic


@pytest.mark.parametrize("training", ["full", "lora"])
def test_steps_teach_the_order_and_what_is_saved_and_merged_predicts_the_same(training, folders, tmp_path):
    rows = make_variants(24)
    labels = [row["y"] for row in rows]
    model, collator = make_model(folders["esm"], training)
    twin = copy.deepcopy(model)
    before = AffinityPredictor(model, collator, device="cpu").predict(rows)
    assert learn(model, collator, rows, labels) > 0.9
    assert learn(twin, collator, rows, [0.0] * len(rows)) == spearmanr(before, labels).statistic  # no order
    after = AffinityPredictor(model, collator, device="cpu").predict(rows)
    assert np.abs(after - before).max() > 0.1

    save_weights(model, tmp_path)
    collator.save_pretrained(tmp_path)
    loaded = AffinityPredictor.from_pretrained(tmp_path, device="cpu")
    np.testing.assert_allclose(loaded.predict(rows), after, atol=1e-5)  # with another kernel
    with pytest.raises(DataError, match="1 row is of another length: row 2 of rows \\(15 residues\\)"):
        loaded.predict([{"sequence": WILD}, {"sequence": WILD[1:]}])
    trained = {name.split(".", 2)[-1] for name, p in load_model(tmp_path).named_parameters() if p.requires_grad}
    if training == "lora":
        assert all("lora_" in name for name in trained)
        merged = AffinityPredictor(merged_copy(model), collator, device="cpu").predict(rows)
        np.testing.assert_allclose(merged, after, atol=1e-4)
    else:
        assert "lm_head.dense.weight" in trained
        assert not any("contact_head" in name for name in trained)


def test_a_row_of_another_length_has_no_score(folders):
    model, collator = make_model(folders["esm"])
    collator.num_residues = None  # of a user's own collator, say
    scores = model.eval()(**collator([{"sequence": one} for one in (WILD, WILD[:-1], f"{WILD}K")])).logits
    assert scores.isnan().tolist() == [False, True, True]


def command(folder, table, out, more=""):
    shared = (
        f"--label_column y --split_column part --use_cpu true --disable_tqdm true --report_to none --output_dir {out}"
    )
    return [*f"--objective likelihood --dataset_name {table} --encoders {folder} {shared} {more}".split()]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--head mlp", "--head goes with a head on embeddings alone"),
        ("--layer 1", "--layer goes with a head on embeddings alone"),
        ("--loss mse", "learns the order of rows: leave --loss mse out"),
        ("--tower_training frozen", "nothing would train"),
        ("--sequence_columns sequence other", "variants in one sequence column"),
        ("--num_seeds 2", "does not go with --loss ranking"),
        ("--encoders {headless}", "lacks weights: .*lm_head.*Take one that was saved with its masked head"),
        ("--encoders {t5}", "type 't5' has no masked head"),
        ("--dataset_name {uneven}", "1 row is of another length: row 3 of validation .17 residues"),
        ("--max_length 10", "the wild type has 16 residues, and --max_length 10 allows 8"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(more, said, folders, tmp_path):
    uneven = make_variants(30)
    uneven[1]["sequence"] += "K"
    if "headless" in more:
        EsmModel.from_pretrained(folders["esm"], add_pooling_layer=False).save_pretrained(tmp_path / "headless")
        AutoTokenizer.from_pretrained(folders["esm"]).save_pretrained(tmp_path / "headless")
    t5 = write_family("t5", tmp_path) if "t5" in more else ""
    uneven_file = write_rows(tmp_path / "uneven.csv", uneven)
    given = more.format(headless=tmp_path / "headless", t5=t5, uneven=uneven_file)
    table = write_rows(tmp_path / "rows.csv", make_variants(30))
    with pytest.raises((ArgumentError, DataError), match=said):
        TASK.main(command(folders["esm"], table, tmp_path / "out", given))


@pytest.mark.nightly
def test_a_run_ranks_its_test_rows_and_its_folder_is_predicted_scored_and_described(folders, tmp_path):
    rows = make_variants(240)
    table = write_rows(tmp_path / "rows.csv", rows)
    out = tmp_path / "out"
    more = "--learning_rate 0.003 --num_train_epochs 20"
    results = TASK.main(command(folders["esm"], table, out, more))
    assert results["settings"]["tower_training"] == ["full"]
    assert results["verdict"]["comparison"]["metric"] == "spearman"
    assert results["test"]["scores"]["model"]["spearman"]["value"] > 0.7
    assert results["test"]["collapse"]["alarms"] == []  # scores have no unit in which they could be far off
    assert "likelihood of their substitutions" in (out / "README.md").read_text()

    test = [row for row in rows if row["part"] == "test"]
    commands.predict(["--model", str(out), "--dataset_name", table, "--output", str(tmp_path / "new.csv")])
    with open(tmp_path / "new.csv") as file:
        again = [float(row["prediction"]) for row in csv.DictReader(file) if row["part"] == "test"]
    with open(out / "predictions.csv") as file:
        predicted = [float(row["prediction"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(again, predicted, atol=1e-4)
    np.testing.assert_allclose(AffinityPredictor.from_pretrained(out).predict(test), predicted, atol=1e-4)
    found = commands.evaluate(["--models", str(out), "--test_of", str(out)])
    assert found["scores"]["out"]["spearman"]["value"] == results["test"]["scores"]["model"]["spearman"]["value"]
    with pytest.raises(ArgumentError, match="it ranks by likelihood, and pools nothing"):
        commands.embed(["--model", str(out), "--dataset_name", table, "--output", "new.h5"])
    assert json.loads((out / "config.json").read_text())["wild_type"][1:4] == [20, 15, 11]  # M, K, T
    pytest.importorskip("onnxruntime")
    with pytest.raises(ArgumentError, match="likelihood of a language model, which is not exported"):
        export.main(["--model", str(out)])
