"""Runs on cached embeddings: what overflows, what is encoded again, and what kills leave."""

import importlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.property import AffinityPredictor
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


def overflow_on(model, ids):
    """Lets encoders overflow in float16, and only there, on one input: a step through 1e5 and back."""

    def hook(module, args, kwargs, output):
        states = output.last_hidden_state
        if kwargs["input_ids"].shape[1] < ids.shape[1]:
            return
        here = (kwargs["input_ids"][:, : ids.shape[1]] == ids).all(1)[:, None, None]
        output["last_hidden_state"] = torch.where(here, states * 1e5 / 1e5, states)

    model.transform_encoders(lambda encoder: encoder.register_forward_hook(hook, with_kwargs=True))


def train_in_float16(model, collator, rows, folder):
    args = FastTrainingArguments(
        **{"output_dir": str(folder), "embedding_cache_dir": str(folder / "cache"), "use_cpu": True, "max_steps": 2},
        **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        speedups=["encoder_precision", "embedding_cache"],
    )
    plan = make_plan(args, model, rows, collator, describe_hardware("T4"))
    plan["encoder_precision"].settings["max_noise"] = 1.0
    trainer = FastTrainer(model, args, collator, rows, plan=plan)
    trainer.train()
    return trainer


def test_a_run_in_float16_encodes_the_one_sequence_that_overflows_in_float32(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    rows = demo_rows.select(range(64))
    sequence = rows["heavy"][38]
    overflow_on(model, collator.encode("heavy", [sequence])["input_ids"])
    reference = model.encode("heavy", collator.encode("heavy", [sequence]))
    trainer = train_in_float16(model, collator, rows, tmp_path)
    assert trainer.plan["encoder_precision"].settings == {"dtype": "fp16", "mode": "weights", "max_noise": 1.0}
    assert trainer.plan["embedding_cache"].evidence["encoded_in_float32"] == 1
    found = trainer.encode_distinct("heavy", [sequence, rows["heavy"][3]])
    assert torch.isfinite(found).all()
    assert (found[:1] - reference).norm() / reference.norm() < 0.01
    model.attach_encoders()
    assert {p.dtype for p in model.encoders.parameters()} == {torch.float16}
    assert not model.encode("heavy", collator.encode("heavy", [sequence])).isfinite().all()  # the live twin overflows
    row = {name: rows[name][38] for name in ("heavy", "light", "antigen")}
    assert math.isfinite(AffinityPredictor(model, collator).predict([row])[0])
    trainer.end()


ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, NUM_LONG = 40, 6  # of 50 residues, and of 90
FAST = "--num_train_epochs 1 --head_sizes 8 --disable_tqdm true --use_cpu true --resume no --without cpu_matmul"


@pytest.fixture
def train(tmp_path, monkeypatch, demo_encoders):
    """Calls max_speed.py on one table and one cache; returns how many sequences it encoded."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    lengths = [90] * NUM_LONG + [50] * (NUM_ROWS - NUM_LONG)
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in lengths]
    Path("rows.csv").write_text("sequence,label\n" + "".join(f"{row},{row.count('A')}\n" for row in rows))

    def call(*words: str) -> int:
        given = ["--dataset_name", "rows.csv", "--encoders", demo_encoders[1], "--embedding_cache_dir", "cache"]
        importlib.import_module("max_speed").main([*given, *FAST.split(), *words])
        plan = json.loads(Path("outputs/affinity/plan.json").read_text())
        return next(one["evidence"]["num_encoded"] for one in plan["decisions"] if one["name"] == "embedding_cache")

    return call


@pytest.mark.nightly
def test_another_rule_for_long_sequences_encodes_the_long_ones_alone(train):
    assert train() == NUM_ROWS
    assert train("--too_long", "truncate", "--max_residues", "60") == NUM_LONG
    assert train("--too_long", "truncate", "--max_residues", "60") == 0
    assert train("--too_long", "truncate", "--max_residues", "70") == NUM_LONG
    assert train("--too_long", "truncate", "--max_residues", "100") == 0  # longer than all: as without
    assert train("--too_long", "truncate", "--max_residues", "45") == NUM_ROWS
    assert train() == 0


RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "max_speed.py"
KILLED_ROWS = 10_000  # 8 shards of training sequences, 1 each of validation and test
SHARD = 1024


@pytest.fixture
def table(tmp_path) -> Path:
    """A CSV of distinct random sequences, 60 to 160 residues, with their share of alanine as label."""
    rng = random.Random(0)
    path = tmp_path / "rows.csv"
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(60, 160))) for _ in range(KILLED_ROWS)]
    path.write_text("sequence,label\n" + "".join(f"{row},{row.count('A') / len(row):.4f}\n" for row in rows))
    return path


def start(table: Path, encoder: str, cache: Path, output: Path) -> subprocess.Popen:
    settings = {
        "dataset_name": table,
        "encoders": encoder,
        "embedding_cache_dir": cache,
        "output_dir": output,
        "num_train_epochs": 1,
        "head_sizes": 8,
        "disable_tqdm": "true",
        "without": "cpu_matmul",  # decided by a measurement, and it changes the last digits
    }
    command = [sys.executable, str(RECIPE), *(str(part) for k, v in settings.items() for part in (f"--{k}", v))]
    with (cache.parent / "log.txt").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


def cache_evidence(output: Path) -> dict:
    plan = json.loads((output / "plan.json").read_text())
    return next(entry["evidence"] for entry in plan["decisions"] if entry["name"] == "embedding_cache")


def num_stored(cache: Path) -> int:
    from hf_ext.embeddings import EmbeddingStore

    (folder,) = cache.iterdir()
    return len(EmbeddingStore(cache, json.loads((folder / "key.json").read_text())))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_kills_during_embedding_leave_the_cache_of_an_uninterrupted_run(tmp_path, table, demo_encoders):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert start(table, demo_encoders[1], reference, tmp_path / "a").wait() == 0
    whole = cache_evidence(tmp_path / "a")
    assert whole["num_encoded"] == KILLED_ROWS
    seconds_per_shard = whole["encoding_seconds"] / KILLED_ROWS * SHARD

    rng = random.Random(0)
    stored = [0]
    for _ in range(10):
        process = start(table, demo_encoders[1], killed, tmp_path / "b")
        opened = time.time()
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "plan.json").unlink(missing_ok=True)
        while process.poll() is None and not (tmp_path / "b" / "plan.json").exists() and time.time() < opened + 120:
            time.sleep(0.02)  # plan.json is written right before encoding starts
        time.sleep(rng.uniform(0, 2 * seconds_per_shard))
        assert process.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        stored.append(num_stored(killed) if killed.exists() and any(killed.iterdir()) else stored[-1])
    assert stored == sorted(stored)  # what was stored stays
    assert 0 < stored[-1] < KILLED_ROWS  # kills came while encoding
    assert start(table, demo_encoders[1], killed, tmp_path / "b").wait() == 0
    assert cache_evidence(tmp_path / "b")["num_encoded"] == KILLED_ROWS - stored[-1]  # only the broken shard twice
    assert contents(killed) == contents(reference)
