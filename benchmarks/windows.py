"""Long proteins: read in windows, cut, or as they are, on real rows with the limit made small.

python benchmarks/windows.py DATA ENCODER WORK [--only gb1 stability] [--seeds 3] [--rows 1500 300 1500]

DATA has the folders of the project's real sets, ENCODER is ESM-2 8M (rotary positions). Of each set so many training,
validation and test rows are drawn, the same for all; each way trains the default head on frozen embeddings once per
seed. Of two ways the test scores are compared row by row: the difference, positive where windows are better, with its
95 % interval. Labels of residues count those that both have read. Proteins above 1,022 residues, longer than
ESM-2 was trained on, are read by one model in windows and as they are.
Before that, what overlaps are worth: the cosine of states of residues in windows of 254 with those of the whole,
of 20 proteins, which ESM-2 reads whole. `results/windows.json` is written after each run.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import run_timed
from transformers import AutoModel, AutoTokenizer

from hf_ext.data import Limit, ResidueTokenizer, encode_windows, join_windows
from hf_ext.evaluation import compare_paired
from hf_ext.property import AffinityPredictor

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "windows.json"
SPLITS = ("train", "valid", "test")
HOMOLOGY = "classes_remote_homology/remote_homology.csv.gz"
STRUCTURE = "residue_secondary_structure/secondary_structure.csv.gz"
RESIDUES = "--label_column labels --mask_column resolved"
# Data, its columns of sequences, labels and splits, the limit in tokens, and words of the run.
SETS = {
    "gb1": ("prop_flip_gb1/gb1.csv.gz", "sequence", "target", "three_vs_rest", 64, "--label_column target"),
    "stability": ("prop_tape_stability/stability.csv.gz", "seq", "label", "set", 34, "--label_column label"),
    "remote homology": (HOMOLOGY, "sequence", "label", "split", 66, "--label_column label --task classification"),
    "secondary structure": (STRUCTURE, "sequence", "labels", "split", 66, RESIDUES),
}
WAYS = {"truncate": "--too_long truncate", "window": "--too_long window", "as they are": ""}
TRAINED = 1022  # residues of the longest proteins that ESM-2 was trained on
WINDOW = 254  # residues
OVERLAPS = (0, 8, 4, 2)  # shares of it: none, an eighth, ...


@torch.no_grad()
def measure_overlaps(given: argparse.Namespace, num: int = 20) -> list[dict[str, Any]]:
    """Cosines of states of windows with those of the whole: all residues, and those beside a window's end."""
    sequences = pd.read_csv(given.data / STRUCTURE)["sequence"]
    chosen = sequences[sequences.str.len().between(2 * WINDOW, TRAINED)].sample(num, random_state=0)
    encoder = AutoModel.from_pretrained(given.encoder, add_pooling_layer=False).eval()
    tokenizer = ResidueTokenizer(AutoTokenizer.from_pretrained(given.encoder))
    found = []
    for share in OVERLAPS:
        limit = Limit(WINDOW, WINDOW // share if share else 0)
        cosines, at_ends = [], []
        num_read = 0
        for sequence in chosen:
            states = []
            for batch in (tokenizer([sequence]), encode_windows(tokenizer, [sequence], limit)):
                ids, mask = batch["input_ids"], batch["attention_mask"]
                joined, _ = join_windows(encoder(input_ids=ids, attention_mask=mask).last_hidden_state, batch)
                states.append(joined[0, 1:-1])
            num_read += len(ids) * WINDOW
            cosines.append(torch.cosine_similarity(*states, dim=-1))
            ends = [start + WINDOW - 1 for start in limit.starts(len(sequence))[:-1]]
            beside = [min(end + i, len(sequence) - 1) for end in ends for i in range(-7, 9)]
            at_ends.append(cosines[-1][beside])
        every, near = (torch.cat(one).mean().item() for one in (cosines, at_ends))
        residues = chosen.str.len().sum()
        found.append({"overlap": limit.overlap, "cosine": every, "at_ends": near, "read": num_read / int(residues)})
        print(found[-1], flush=True)
    return found


def draw(name: str, given: argparse.Namespace) -> Path:
    """A table of the rows that are drawn, and of those that are left the long ones."""
    file, column, _, split, *_ = SETS[name]
    table = pd.read_csv(given.data / file, dtype=str)
    generator = np.random.default_rng(0)
    chosen = []
    for part, num in zip(SPLITS, given.rows):
        rows = np.flatnonzero(table[split] == part)
        chosen.append(np.sort(generator.permutation(rows)[:num]))
    path = given.work / f"{name.replace(' ', '_')}.csv"
    table.iloc[np.concatenate(chosen)].to_csv(path, index=False)
    rest = table.drop(index=np.concatenate(chosen))
    rest[rest[column].str.len() > TRAINED].to_csv(path.with_suffix(".long.csv"), index=False)
    return path


def train(name: str, way: str, seed: int, path: Path, given: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """One run in a process of its own; its folder, and what it cost."""
    _, column, _, split, limit, words = SETS[name]
    out = given.work / f"{path.stem}-{way.replace(' ', '_')}-{seed}"
    command = [sys.executable, "-m", "hf_ext", "train", "--dataset_name", str(path), "--sequence_columns", column]
    command += [*words.split(), "--split_column", split, "--encoders", str(given.encoder), "--seed", str(seed)]
    command += ["--output_dir", str(out), "--embedding_cache_dir", str(given.work / "cache"), *WAYS[way].split()]
    command += ["--max_length", str(limit)] if WAYS[way] else []
    done, cpu_s, _ = run_timed([*command, "--disable_tqdm", "true", "--use_cpu", "true"])
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    scores = json.loads((out / "all_results.json").read_text())["test"]["scores"]["model"]
    kept = {metric: scores[metric]["value"] for metric in ("spearman", "accuracy") if metric in scores}
    return out, {"data": name, "way": way, "seed": seed, "cpu_s": round(cpu_s, 1), "scores": kept}


def read(folder: Path, label: str) -> tuple[list[str], list[str]]:
    """Labels and predictions of the test rows."""
    with (folder / "predictions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    column = label if label in rows[0] else "label"
    return [row[column] for row in rows], [row["prediction"] for row in rows]


def count_right(labels: list[str], *predicted: list[str]) -> list[np.ndarray]:
    """Of each row the residues that all have read, and how many of them each side gets right."""
    counts = []
    for truth, *said in zip(labels, *predicted):
        known = [i for i in range(min(map(len, said))) if i < len(truth) and truth[i] in "HEC"]
        counts.append([len(known), *(sum(one[i] == truth[i] for i in known) for one in said)])
    return [*np.array(counts, float).T]


def compare(name: str, other: Path, windows: Path) -> dict[str, Any]:
    """Compares two runs on their test rows."""
    label = SETS[name][2]
    labels, before = read(other, label)
    _, after = read(windows, label)
    if name == "secondary structure":
        return asdict(compare_paired(*count_right(labels, before, after), "accuracy"))
    if name == "remote homology":
        right = [np.array([said == truth for said, truth in zip(one, labels)], float) for one in (before, after)]
        return asdict(compare_paired(np.ones(len(labels)), *right, "accuracy"))
    values = [np.array([*map(float, one)]) for one in (labels, before, after)]
    return asdict(compare_paired(*values, "spearman"))


def compare_long(folder: Path, path: Path) -> dict[str, Any]:
    """Compares windows with the whole, of proteins longer than the encoder was trained on, by one model."""
    table = pd.read_csv(path.with_suffix(".long.csv"), dtype=str)
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    said = {}
    for way, limit in (("as they are", None), ("window", TRAINED)):
        for tokenizer in predictor.collator.tokenizers.values():
            tokenizer.max_residues = limit
        predictor.collator.too_long = "window"
        said[way] = predictor.predict(table[["sequence"]])
    found = compare_paired(*count_right([*table["labels"]], said["as they are"], said["window"]), "accuracy")
    return {"num_proteins": len(table), **asdict(found)}


def main() -> None:
    """Runs what is asked for, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoder", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*SETS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs=3, default=[1500, 300, 1500])
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found = json.loads(given.output.read_text()) if given.output.exists() else {"runs": [], "paired": [], "long": []}
    found.setdefault("overlaps", []).extend([] if found.get("overlaps") else measure_overlaps(given))
    for seed in range(given.seeds):
        for name in given.only:
            if any((one["data"], one["seed"]) == (name, seed) for one in found["paired"]):
                continue
            path = draw(name, given)
            folders = {}
            for way in WAYS:
                folders[way], run = train(name, way, seed, path, given)
                found["runs"].append(run)
                print(run, flush=True)
            for way in ("truncate", "as they are"):
                pair = {"data": name, "seed": seed, "against": way, **compare(name, folders[way], folders["window"])}
                found["paired"].append(pair)
                print(pair, flush=True)
            if name == "secondary structure":
                found["long"].append({"seed": seed, **compare_long(folders["as they are"], path)})
            given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
