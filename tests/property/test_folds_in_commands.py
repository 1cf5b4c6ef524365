"""Commands of several runs, whole: each kind of label, trained encoders, kills, two processes, the Hub."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hub_server import serve_hub
from launches import TWO_CPUS, clean_environment
from test_folds import QUICK, make_rows
from test_label_kinds_in_a_run import FLAGS, make_table
from test_label_kinds_in_a_run import QUICK as QUICK_KINDS

from hf_ext.finished import evaluate, predict
from hf_ext.hub import push_folder
from hf_ext.property import TASK, AffinityPredictor

pytestmark = [pytest.mark.nightly, pytest.mark.internals]
KINDS = {"lists": "", "classes": "", "sets": FLAGS["sets"], "residues": FLAGS["residues"], "profile": ""}


def own_words(folder: Path, encoder: str, words: str) -> list[str]:
    given = f"--dataset_name {folder}/rows.csv --encoders {encoder} --embedding_cache_dir {folder}/cache {words}"
    return given.split()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_label_is_predicted_by_folds_and_by_the_mean_of_their_models(
    kind, tmp_path, demo_encoders, monkeypatch
):
    make_table(kind, tmp_path / "rows.csv")
    words = own_words(tmp_path, demo_encoders[1], f"{QUICK_KINDS} {KINDS[kind]} --num_train_epochs 3 --output_dir")
    results = TASK.main([*words, str(tmp_path / "out"), "--folds", "3", "--num_seeds", "2"])
    assert results["test"]["num_rows"] == 240
    assert len(results["repeats"]["folds"]) == 3
    listed = pd.read_csv(tmp_path / "out" / "predictions.csv", dtype=str)
    assert len(listed) == 240
    assert "fold" in listed
    assert any(name.startswith("prediction") for name in listed)  # of several numbers a column each
    scored = evaluate.main(["--models", str(tmp_path / "out" / "predictions.csv"), "--test_of", str(tmp_path / "out")])
    metric = results["verdict"]["comparison"]["metric"]
    of_run = results["test"]["scores"]["model"][metric]["value"]
    is_certain = kind == "residues"  # a CSV has their classes, not their probabilities
    assert scored["scores"]["predictions.csv"][metric]["value"] == pytest.approx(of_run, rel=1e-4) or is_certain
    asked = ["--model", str(tmp_path / "out"), "--dataset_name", str(tmp_path / "rows.csv"), "--output"]
    predict.main([*asked, str(tmp_path / "new.csv"), "--use_cpu", "true", "--embedding_cache_dir", f"{tmp_path}/cache"])
    new = pd.read_csv(tmp_path / "new.csv")
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 100)  # of 240
    predict.main([*asked, str(tmp_path / "blocks.csv"), "--use_cpu", "true", "--embedding_cache_dir", f"{tmp_path}/b"])
    blocks = pd.read_csv(tmp_path / "blocks.csv")
    assert [*blocks] == [*new]
    assert np.mean(blocks[new.columns[-1]] == new[new.columns[-1]]) > 0.98 or kind != "residues"
    assert all(np.allclose(blocks[name], new[name], atol=1e-4) for name in new.select_dtypes("number"))
    rows = pd.read_csv(tmp_path / "rows.csv", dtype=str)[["sequence"]]
    predicted = AffinityPredictor.from_pretrained(tmp_path / "out", device="cpu").predict(rows)
    if kind == "classes":
        assert np.mean(new["prediction"].to_numpy() == predicted) > 0.99
    elif kind == "residues":
        assert np.mean([one == other for one, other in zip(new["prediction"], predicted)]) > 0.95


@pytest.mark.parametrize("words", ["--use_peft true", "--tower_training full"])
def test_models_of_several_seeds_that_were_fine_tuned_predict_their_mean(words, tmp_path, demo_encoders, monkeypatch):
    make_rows().to_csv(tmp_path / "rows.csv", index=False)
    given = own_words(tmp_path, demo_encoders[1], f"{QUICK} {words} --num_seeds 2 --output_dir {tmp_path}/out")
    results = TASK.main(given)
    found = pd.read_csv(tmp_path / "out" / "predictions.csv")
    both = [pd.read_csv(tmp_path / "out" / f"seed_{seed}" / "predictions.csv")["prediction"] for seed in (42, 43)]
    assert not np.allclose(*both)
    assert np.allclose(found["prediction"], (both[0] + both[1]) / 2)
    assert results["repeats"]["spread"]["rmse"]["std_seeds"] > 0
    predictor = AffinityPredictor.from_pretrained(tmp_path / "out")
    predicted = predictor.predict(found[["sequence"]])
    assert np.allclose(predicted, found["prediction"], atol=0.01)  # encoders may have trained in half precision
    asked = ["--model", str(tmp_path / "out"), "--dataset_name", str(tmp_path / "rows.csv"), "--use_cpu", "true"]
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 50)
    written = pd.read_csv(predict.main([*asked, "--output", str(tmp_path / "new.csv")]))
    assert np.allclose(written["prediction"], predictor.predict(written[["sequence"]]), atol=1e-3)


def test_a_final_model_of_all_rows_predicts_and_is_not_scored(tmp_path, demo_encoders):
    make_rows().to_csv(tmp_path / "rows.csv", index=False)
    words = f"{QUICK} --head mlp --folds site --final_model all --output_dir {tmp_path}/out --require rmse<=0.001"
    given = own_words(tmp_path, demo_encoders[1], words)
    with pytest.raises(Exception, match=r"rmse is .*, expected <=0\.001\. Models and report are whole"):
        TASK.main(given)
    final = tmp_path / "out" / "final" / "seed_42"
    assert not (final / "predictions.csv").exists()
    assert "which nothing scored" in (tmp_path / "out" / "README.md").read_text()
    rows = make_rows(4)
    both = [AffinityPredictor.from_pretrained(one).predict(rows) for one in (tmp_path / "out", final)]
    assert np.array_equal(*both)


def test_models_of_folds_are_pushed_and_loaded_from_the_hub(tmp_path, demo_encoders, monkeypatch):
    make_rows().to_csv(tmp_path / "rows.csv", index=False)
    words = f"{QUICK} --head mlp --folds 2 --save_full true --output_dir {tmp_path}/out"
    TASK.main(own_words(tmp_path, demo_encoders[1], words))
    token = "hf_" + "a" * 34
    monkeypatch.setenv("HF_TOKEN", token)
    with serve_hub(monkeypatch, token):
        push = push_folder(tmp_path / "out", "me/folds", token=token)
        loaded = AffinityPredictor.from_pretrained("me/folds", revision=push.oid)
    here = AffinityPredictor.from_pretrained(tmp_path / "out")
    rows = make_rows(4)
    assert len(loaded.others) == 1
    assert np.array_equal(loaded.predict(rows), here.predict(rows))


def start(words: list[str], log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "hf_ext", "train", *words]
    return subprocess.Popen(command, env=clean_environment(), stdout=log.open("a"), stderr=subprocess.STDOUT)


def test_a_killed_command_goes_on_and_predicts_the_same_bits(tmp_path, demo_encoders):
    make_rows().to_csv(tmp_path / "rows.csv", index=False)
    words = own_words(tmp_path, demo_encoders[1], f"{QUICK} --head mlp --num_train_epochs 6 --folds 2 --num_seeds 2")
    log = tmp_path / "log"
    assert start([*words, "--output_dir", str(tmp_path / "whole")], log).wait(600) == 0, log.read_text()
    killed = [*words, "--output_dir", str(tmp_path / "killed")]
    moments = (
        "fold_1/seed_42/checkpoint-*",
        "fold_1/seed_43/run.log",
        "fold_2/seed_42/held_out.parquet",
        "members.json",
    )
    for moment in moments:
        process = start(killed, log)
        ends = time.monotonic() + 300
        while not [*(tmp_path / "killed").glob(moment)] and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, log.read_text()[-3000:]
        first = tmp_path / "killed" / "fold_1" / "seed_42" / "model.safetensors"
        before = first.stat().st_mtime_ns if moment != moments[0] else None
    assert start(killed, log).wait(600) == 0, log.read_text()[-3000:]
    assert first.stat().st_mtime_ns == before
    both = [(tmp_path / name / "predictions.csv").read_bytes() for name in ("whole", "killed")]
    assert both[0] == both[1]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_make_the_runs_together(tmp_path, demo_encoders):
    make_rows().to_csv(tmp_path / "rows.csv", index=False)
    given = f"{QUICK} --head mlp --folds 2 --num_seeds 2 --output_dir {tmp_path}/out"
    words = ["-m", "hf_ext", "train", *own_words(tmp_path, demo_encoders[1], given)]
    for made in ("4 to make", "0 to make"):
        (command,) = TWO_CPUS.commands(words)
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert made in done.stdout
    assert len(pd.read_csv(tmp_path / "out" / "predictions.csv")) == 96
