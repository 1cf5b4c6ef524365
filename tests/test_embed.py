"""`hf-ext embed` writes what a script of transformers would, in each format, of each encoder, after kills."""

import random
import subprocess
import sys
import time

import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from commands import embed
from launches import TWO_CPUS, clean_environment
from transformers import AutoModel, AutoTokenizer

from hf_ext.embeddings import hash_sequence
from hf_ext.errors import ArgumentError, DataError
from hf_ext.models import LoraSettings

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
QUIET = ["--use_cpu", "--disable_tqdm"]


def draw(num, longest, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(4, longest))) for _ in range(num)]


SEQUENCES = draw(24, 30)
SEQUENCES[5] = SEQUENCES[3]
IDS = [f"P{i}/{i}" for i in range(24)]
NAMES = [f"P{i}_{i}" for i in range(24)]


@pytest.fixture
def fasta(tmp_path):
    """24 proteins, of which two have one sequence."""
    path = tmp_path / "p.fasta"
    path.write_text("".join(f">{one}\n{row}\n" for one, row in zip(IDS, SEQUENCES)))
    return path


@pytest.fixture
def run(fasta, demo_encoders, tmp_path):
    """Embeds the proteins into a file of this name with the ESM-2 of the demo; its path."""

    def embedded(name, *words, encoder=demo_encoders[1]):
        source = ["--encoder", encoder] if encoder else []
        return embed([*source, "--dataset_name", str(fasta), "--output", str(tmp_path / name), *QUIET, *words])

    return embedded


def read(path):
    with h5py.File(path, "r") as file:
        return {name: file[name][()] for name in file}, {name: file[name].attrs["original_id"] for name in file}


@torch.no_grad()
def states_of(encoder, layer=None):
    """States of the residues of each protein as a script of transformers computes them, one sequence at a time."""
    model = AutoModel.from_pretrained(encoder, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    found = []
    for sequence in SEQUENCES:
        text = sequence if type(tokenizer).__name__ == "EsmTokenizer" else " ".join(sequence)
        output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        states = output.hidden_states[layer] if layer else output.last_hidden_state
        found.append(states[0, 1:-1].numpy())
    return found


def farthest(found, expected):
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def test_hdf5_holds_what_a_script_of_transformers_writes(run, demo_encoders, tmp_path):
    states = states_of(demo_encoders[1])
    found, originals = read(run("residues.h5", "--per", "residue"))
    assert originals == dict(zip(NAMES, IDS))
    assert farthest([found[name] for name in NAMES], states) < 1e-5
    for pooling, pool in {"mean": np.mean, "max": np.max}.items():
        found, _ = read(run(f"{pooling}.h5", "--pooling", pooling))
        assert farthest([found[name] for name in NAMES], [pool(one, 0) for one in states]) < 1e-5
        assert farthest([found[name] for name in NAMES], [pool(one[1:], 0) for one in states]) > 1e-3
    assert {path.name for path in tmp_path.iterdir()} == {"p.fasta", "residues.h5", "mean.h5", "max.h5"}


def test_other_formats_hold_the_same_numbers_and_a_hash_stands_once(run):
    expected, _ = read(run("a.h5"))
    archive = np.load(run("a.npz"))
    table = pq.read_table(run("a.parquet"))
    assert {name: archive[name].tolist() for name in archive} == {name: one.tolist() for name, one in expected.items()}
    assert dict(zip(table["id"].to_pylist(), table["embedding"].to_pylist())) == {
        name: one.tolist() for name, one in expected.items()
    }
    assert table["original_id"].to_pylist() == IDS
    half, originals = read(run("half.h5", "--names", "hash", "--dtype", "float16"))
    assert half.keys() == {*map(hash_sequence, SEQUENCES)}
    assert originals[hash_sequence(SEQUENCES[5])] == "P3/3"
    assert {one.dtype.name for one in half.values()} == {"float16"}
    by_hash = {hash_sequence(row): expected[name] for name, row in zip(NAMES, SEQUENCES)}
    assert all(np.array_equal(half[name], one.astype(np.float16)) for name, one in by_hash.items())


def test_layers_stand_side_by_side_and_packing_changes_nothing(run, demo_encoders):
    bert, _ = demo_encoders
    both, _ = read(run("both.h5", "--layer", "2", "1", "--per", "residue"))
    apart = [read(run(f"{layer}.h5", "--layer", layer, "--per", "residue"))[0] for layer in "12"]
    assert farthest([both[name] for name in NAMES], [np.hstack([one[name] for one in apart]) for name in NAMES]) < 1e-5
    plain, _ = read(run("plain.h5", "--layer", "1", "2", "--per", "residue", "--speedups", "embedding_cache"))
    assert farthest([both[name] for name in NAMES], [plain[name] for name in NAMES]) < 1e-5
    found, _ = read(run("bert.h5", "--layer", "1", "2", "--per", "residue", encoder=bert))
    expected = np.split(
        np.hstack([np.vstack(states_of(bert, layer)) for layer in (1, 2)]), np.cumsum([*map(len, SEQUENCES)])[:-1]
    )
    assert farthest([found[name] for name in NAMES], expected) < 1e-5


def test_a_finished_model_embeds_by_what_it_has_learned(run, make_affinity, demo_encoders, tmp_path):
    from inside import build_affinity_model

    from hf_ext.data import DataArguments
    from hf_ext.property import AffinityArguments, build_collator

    asked = AffinityArguments(encoders=[demo_encoders[1]], tower_training=["lora"], head_sizes=[8])
    torch.manual_seed(0)
    model = build_affinity_model(asked, ["sequence"], LoraSettings())
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    collator = build_collator(model, DataArguments())
    model.save_pretrained(tmp_path / "model")
    collator.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model.eval().encode("sequence", collator.encode("sequence", SEQUENCES)).numpy()
    found, _ = read(run("tuned.h5", "--model", str(tmp_path / "model"), encoder=None))
    plain, _ = read(run("plain.h5"))
    assert farthest([found[name] for name in NAMES], expected) < 1e-5
    assert farthest([plain[name] for name in NAMES], expected) > 1e-2


def test_what_cannot_be_written_is_refused_before_anything_is_encoded(run, fasta, demo_encoders, tmp_path):
    (tmp_path / "there.h5").write_text("mine")
    two = ["--sequence_columns", "id", "sequence", "--per", "residue"]
    for name, words, told in (
        ("there.h5", [], "is there, and nothing is replaced"),
        ("a.csv", [], "give .h5, .hdf5, .npz, .parquet"),
        ("a.h5", ["--layer", "3"], "has 2 layers"),
        ("a.h5", ["--pooling", "median"], "allowed are mean"),
        ("a.h5", ["--pooling", "max", "--per", "residue"], "makes one vector of a protein"),
        ("a.h5", ["--model", "x"], "Which encoder"),
        ("a.h5", ["--without", "embedding_cache"], "needs embedding_cache"),
        ("a.h5", two, "of one sequence column"),
    ):
        with pytest.raises(ArgumentError, match=told):
            run(name, *words)
    assert (tmp_path / "there.h5").read_text() == "mine"
    fasta.write_text(">A\nMKT\n>A\nMSE\n")
    with pytest.raises(DataError, match="none is empty or there twice"):
        run("a.h5")
    run("a.h5", "--names", "hash", "--dry_run")
    assert {path.name for path in tmp_path.iterdir()} == {"p.fasta", "there.h5"}


def command(path, encoder, output):
    words = ["embed", "--encoder", encoder, "--dataset_name", str(path), "--output", str(output), *QUIET]
    return [*words, "--without", "cpu_matmul"]  # decided by a measurement, and it changes the last digits


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kills_leave_no_file_or_the_whole_one_and_the_same_command_ends_it(tmp_path, demo_encoders):
    table = tmp_path / "rows.csv"
    pd.DataFrame({"sequence": draw(6_000, 160)}).drop_duplicates().to_csv(table, index=False)
    whole = tmp_path / "whole.h5"
    start = [sys.executable, "-m", "hf_ext"]
    subprocess.run([*start, *command(table, demo_encoders[1], whole)], env=clean_environment(), check=True)
    rng = random.Random(0)
    killed = tmp_path / "killed.h5"
    parts = tmp_path / "killed.h5.parts"
    num_kills = 0
    for _ in range(8):
        process = subprocess.Popen([*start, *command(table, demo_encoders[1], killed)], env=clean_environment())
        num_parts = len([*parts.rglob("rows-*.safetensors")])
        while process.poll() is None and len([*parts.rglob("rows-*.safetensors")]) == num_parts:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))  # while the next part is encoded, or written
        num_kills += process.poll() is None
        process.kill()
        process.wait()
        if killed.exists():
            break
        assert {path.suffix for path in tmp_path.iterdir()} <= {".csv", ".h5", ".parts", ".tmp"}
    if not killed.exists():
        subprocess.run([*start, *command(table, demo_encoders[1], killed)], env=clean_environment(), check=True)
    assert num_kills
    expected, found = read(whole), read(killed)
    assert expected[1] == found[1]
    assert all(np.array_equal(found[0][name], one) for name, one in expected[0].items())
    assert not (tmp_path / "killed.h5.parts").exists()


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_write_what_one_does(run, fasta, demo_encoders, tmp_path):
    (launch,) = TWO_CPUS.commands(["-m", "hf_ext", *command(fasta, demo_encoders[1], tmp_path / "two.h5")])
    done = subprocess.run(launch, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    two, one = read(tmp_path / "two.h5"), read(run("one.h5"))
    assert two[1] == one[1]
    assert farthest([two[0][name] for name in one[0]], [*one[0].values()]) < 1e-5
