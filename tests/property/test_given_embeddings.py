"""`--embeddings`: heads on vectors of a file learn what they learn on the encoder that wrote it; no encoder is kept."""

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from commands import embed, evaluate, examine, predict

from hf_ext.errors import ArgumentError, DataError
from hf_ext.property import TASK, AffinityPredictor

LETTERS = np.array([*"ACDEFGHIKLMNPQRSTVWY"])
QUICK = (
    "--num_train_epochs 4 --learning_rate 0.01 --per_device_train_batch_size 16 --disable_tqdm true --use_cpu true "
    "--without encoder_precision cpu_matmul --split_sizes 0.5 0.2 0.3"
)
COMPUTING = ["--use_cpu", "--disable_tqdm", "--without", "cpu_matmul"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """120 proteins, whose residues decide the label; the working folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    numbers = [generator.integers(0, 20, 8 + i % 8) for i in range(120)]
    rows = {"name": [f"P{i}" for i in range(120)], "sequence": ["".join(LETTERS[one]) for one in numbers]}
    rows["label"] = [np.mean(one) - 9.5 for one in numbers]
    rows["states"] = ["".join(np.array([*"HEC"])[one % 3]) for one in numbers]
    pd.DataFrame(rows).to_csv("rows.csv", index=False)
    return tmp_path


def train(folder, *words):
    own = ["--dataset_name", "rows.csv", "--output_dir", folder, "--embedding_cache_dir", f"{folder}-cache"]
    return TASK.main([*own, *QUICK.split(), *words])


def write(encoder, output, *words):
    embed(["--encoder", encoder, "--dataset_name", "rows.csv", "--output", output, *COMPUTING, *words])


def predicted(model, output, *words):
    given = ["--model", model, "--dataset_name", "rows.csv", "--output", output, "--embedding_cache_dir", "new"]
    predict([*given, *COMPUTING, *words])
    return pd.read_csv(output)["prediction"]


def test_a_head_is_trained_on_vectors_without_an_encoder_and_says_so(table, demo_encoders):
    write(demo_encoders[1], "v.h5", "--id_column", "name")
    given = ["--embeddings", "v.h5", "--id_column", "name"]
    train("ours", *given, "--head", "mlp", "--head_sizes", "16", "--num_train_epochs", "1")
    assert json.loads(Path("ours/config.json").read_text())["encoders"][0]["config"]["hidden_size"] == 64
    assert "reads vectors of 64 numbers" in Path("ours/README.md").read_text()
    assert len(predicted("ours", "ours.csv", *given)) == 120
    with pytest.raises(ArgumentError, match=r"no encoder: it reads vectors of 64 numbers .* --embeddings FILE"):
        predicted("ours", "none.csv")


@pytest.mark.nightly
def test_vectors_of_a_file_train_predict_and_score_as_the_encoder_that_wrote_them(table, demo_encoders):
    esm = demo_encoders[1]
    write(esm, "v.h5", "--id_column", "name")
    given = ["--embeddings", "v.h5", "--id_column", "name"]
    heads = ["--head", "mlp", "--head_sizes", "16"]
    ours = train("ours", *given, *heads)
    theirs = train("theirs", "--encoders", esm, *heads)
    for name in ("model", "ridge on embeddings"):
        found, expected = (one["test"]["scores"][name]["rmse"]["value"] for one in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-3)
    expected = predicted("theirs", "theirs.csv")
    assert np.allclose(predicted("ours", "ours.csv", *given), expected, atol=1e-3)
    write(esm, "other.npz", "--names", "hash", "--layer", "1")
    assert not np.allclose(predicted("ours", "wrong.csv", "--embeddings", "other.npz"), expected, atol=1e-2)
    scored = evaluate(["--models", "ours", "theirs", "--dataset_name", "rows.csv", *given, *COMPUTING])
    assert scored["scores"]["ours"]["rmse"]["value"] == pytest.approx(
        scored["scores"]["theirs"]["rmse"]["value"], rel=1e-3
    )
    with pytest.raises(ArgumentError, match="no encoder: it reads vectors"):
        AffinityPredictor.from_pretrained("ours")
    with pytest.raises(ArgumentError, match="reads sequences by its own encoders"):
        predicted("theirs", "none.csv", *given)
    write(esm, "wide.h5", "--layer", "1", "2")
    with pytest.raises(ArgumentError, match="vectors of 128, and the model reads 64"):
        predicted("ours", "none.csv", "--embeddings", "wide.h5")


@pytest.mark.nightly
def test_several_heads_and_heads_of_residues_are_trained_on_vectors_too(table, demo_encoders):
    esm = demo_encoders[1]
    write(esm, "v.parquet", "--id_column", "name")
    write(esm, "r.h5", "--per", "residue", "--dtype", "float16")
    mixed = train("mixed", "--embeddings", "v.parquet", "--id_column", "name")
    assert mixed["ensemble"]["members"]
    assert len(predicted("mixed", "m.csv", "--embeddings", "v.parquet", "--id_column", "name")) == 120
    residues = ["--label_column", "states", "--num_train_epochs", "12"]
    ours = train("ours", "--embeddings", "r.h5", *residues)
    theirs = train("theirs", "--encoders", esm, *residues)
    found, expected = (one["test"]["scores"]["model"]["accuracy"]["value"] for one in (ours, theirs))
    assert found == pytest.approx(expected, abs=0.02)
    assert found > 0.8
    expected = predicted("theirs", "a.csv")
    assert (
        np.mean([one == other for one, other in zip(predicted("ours", "b.csv", "--embeddings", "r.h5"), expected)])
        > 0.9
    )


def test_rows_without_a_vector_and_what_only_encoders_have_are_refused(table, demo_encoders, capsys):
    write(demo_encoders[1], "v.h5", "--id_column", "name")
    with h5py.File("v.h5", "a") as file:
        del file["P7"]
    given = ["--embeddings", "v.h5", "--id_column", "name"]
    with pytest.raises(
        DataError, match=r"v\.h5: .*\n.*rows\.csv, row 9, column 'sequence', value 'P7': the file has no vector for it"
    ):
        train("out", *given)
    own = ["--dataset_name", "rows.csv", "--measure_seconds", "0", *given]
    assert examine(own) == 1
    assert "the file has no vector for it" in " ".join(capsys.readouterr().out.split())
    assert examine([*own, "--filter", "name != 'P7'"]) == 0
    for words in (["--encoders", "x"], ["--layer", "2"], ["--pooling", "max"], ["--save_full"], ["--stock_trainer"]):
        with pytest.raises(ArgumentError, match=f"without an encoder {words[0]} means nothing"):
            train("out", *given, *words)
    with pytest.raises(ArgumentError, match="no encoder that could train"):
        train("out", *given, "--filter", "name != 'P7'", "--use_peft")
