"""`hf-ext train` on variants of one protein: mutations, a split by position, what report and doctor say."""

import json
from pathlib import Path

import commands
import numpy as np
import pandas as pd
import pytest

from hf_ext.data import read_mutations
from hf_ext.property import TASK
from hf_ext.reporting import position_chart

WILD = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"
QUICK = (
    "--num_train_epochs 2 --learning_rate 0.01 --per_device_train_batch_size 32 --head mlp --head_sizes 8 "
    "--disable_tqdm true --use_cpu true --without encoder_precision --split_sizes 0.6 0.2 0.2"
)
LINE = "variants of one protein: column 'sequence', 30 residues; training rows change"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_encoders) -> tuple[Path, list[str]]:
    """The folder of a run on 150 single substitutions and the wild type, and the words of its rows."""
    root = tmp_path_factory.mktemp("variants")
    words = [f"{WILD[i]}{i + 1}{new}" for i in range(30) for new in "GPWDH" if new != WILD[i]]
    label = np.random.default_rng(0).normal(size=1 + len(words)).round(3)
    pd.DataFrame({"mutant": ["WT", *words], "label": label}).to_csv(root / "rows.csv", index=False)
    (root / "wild.fasta").write_text(f">it\n{WILD}\n")
    rows = f"--dataset_name {root}/rows.csv --mutation_column mutant --wild_type {root}/wild.fasta".split()
    own = f"--encoders {demo_encoders[1]} --embedding_cache_dir {root}/cache --output_dir {root}/run {QUICK}"
    TASK.main([*rows, *own.split(), "--split", "position"])
    return root, rows


def test_a_run_by_position_says_so_and_draws_the_error_of_each_position(trained):
    root, _ = trained
    results = json.loads((root / "run" / "all_results.json").read_text())
    assert results["data"]["variants"] == {"column": "sequence", "wild_type": WILD}
    assert results["test"]["interval_by"] == "position"
    listed = pd.read_csv(root / "run" / "predictions.csv")
    positions = [next(i + 1 for i in range(30) if one[i] != WILD[i]) for one in listed["sequence"]]
    assert listed["split_cluster"].to_list() == positions
    page = (root / "run" / "report.html").read_text()
    assert "Whole positions were held out (position)" in page
    assert LINE.replace("'", "&#39;") in page
    assert f"Mean absolute error by position, {len(listed)} test rows" in page
    folder = str(root / "run")
    scored = commands.evaluate(["--models", folder, "--test_of", folder, "--use_cpu", "true"])
    of_run = results["test"]["scores"]["model"]["rmse"]
    found = scored["scores"]["run"]["rmse"]
    assert [found[name] for name in ("value", "low", "high")] == pytest.approx(
        [of_run[n] for n in ("value", "low", "high")], rel=0.05
    )


def test_mutations_are_predicted_as_their_sequences_are(trained):
    root, rows = trained
    words = ["WT", "M1G", "K2P:T3W"]
    pd.DataFrame({"mutant": words}).to_csv(root / "new.csv", index=False)
    pd.DataFrame({"sequence": [read_mutations(one, WILD).value for one in words]}).to_csv(
        root / "long.csv", index=False
    )
    own = ["--model", str(root / "run"), "--use_cpu", "true", "--output"]
    commands.predict([*own, str(root / "a.csv"), "--dataset_name", str(root / "new.csv"), *rows[2:]])
    commands.predict([*own, str(root / "b.csv"), "--dataset_name", str(root / "long.csv")])
    short, whole = (pd.read_csv(root / name) for name in ("a.csv", "b.csv"))
    assert short["mutant"].to_list() == words
    assert np.allclose(short["prediction"], whole["prediction"], atol=1e-6)
    assert short["prediction"].nunique() == 3


def test_the_doctor_says_which_variants_rows_are(trained, demo_encoders, capsys):
    root, rows = trained
    own = ["--encoders", demo_encoders[1], "--output_dir", str(root / "none"), "--measure_seconds", "0"]
    assert commands.examine([*rows, *own, "--split", "position"]) == 0
    assert LINE in " ".join(capsys.readouterr().out.split())
    assert commands.examine([*rows, *own, "--split", "mutations"]) == 1
    assert "--split mutations: all rows have at most 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly
def test_every_row_is_tested_by_a_fold_that_has_not_seen_its_position(trained, demo_encoders):
    root, rows = trained
    own = f"--encoders {demo_encoders[1]} --embedding_cache_dir {root}/cache --output_dir {root}/folds {QUICK}"
    results = TASK.main([*rows, *own.split(), "--split", "position:modulo", "--folds", "5"])
    listed = pd.read_csv(root / "folds" / "predictions.csv")
    assert len(listed) == results["test"]["num_rows"] == len(pd.read_csv(root / "rows.csv"))
    assert listed.groupby("split_cluster")["fold"].nunique().max() == 1
    single = listed[listed["split_cluster"] > 0]  # 0: the wild type
    assert single["fold"].nunique() == 5
    assert all(len({*of % 5}) == 1 for _, of in single.groupby("fold")["split_cluster"])


def test_errors_are_averaged_by_position():
    rows = [WILD, "G" + WILD[1:], "GG" + WILD[2:], "P" + WILD[1:], WILD[1:], "W" + WILD[1:]]
    chart = position_chart(np.array([9.0, -1, 2, 6, 9, np.nan]), rows, WILD)
    assert chart is not None
    (axes,) = chart.figure.axes
    assert [bar.get_height() for bar in axes.patches] == [3.0, 2.0]  # (1 + 2 + 6) / 3 at M1, 2 at K2
    assert [bar.get_center()[0] for bar in axes.patches] == [1, 2]
    assert "(1 to 3)" in chart.caption
    assert position_chart(np.zeros(1), [WILD], WILD) is None
