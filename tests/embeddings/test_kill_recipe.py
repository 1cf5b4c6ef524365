"""Ten kills -9 while the real recipe fills its cache, and the cache is the one of a run that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "max_speed.py"
NUM_ROWS = 10_000  # 8 shards of training sequences, 1 each of validation and test
SHARD = 1024


@pytest.fixture
def table(tmp_path) -> Path:
    """A CSV of distinct random sequences, 60 to 160 residues, with their share of alanine as label."""
    rng = random.Random(0)
    path = tmp_path / "rows.csv"
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(60, 160))) for _ in range(NUM_ROWS)]
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
    from hf_ext.embeddings.store import EmbeddingStore

    (folder,) = cache.iterdir()
    return len(EmbeddingStore(cache, json.loads((folder / "key.json").read_text())))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_kills_during_embedding_leave_the_cache_of_an_uninterrupted_run(tmp_path, table, demo_encoders):
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert start(table, demo_encoders[1], reference, tmp_path / "a").wait() == 0
    whole = cache_evidence(tmp_path / "a")
    assert whole["num_encoded"] == NUM_ROWS
    seconds_per_shard = whole["encoding_seconds"] / NUM_ROWS * SHARD

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
    assert 0 < stored[-1] < NUM_ROWS  # kills came while encoding
    assert start(table, demo_encoders[1], killed, tmp_path / "b").wait() == 0
    assert cache_evidence(tmp_path / "b")["num_encoded"] == NUM_ROWS - stored[-1]  # nothing twice but the broken shard
    assert contents(killed) == contents(reference)
