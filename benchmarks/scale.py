"""What a run takes by the number of its rows: time, memory, disk, beside what the doctor says before it.

    python benchmarks/scale.py WORK [--rows 125000 250000 500000 1000000]

Random proteins of 120 residues, all different; an ESM-2 of two layers, 64 wide, with random weights, so that encoding
costs little and what remains is ours: reading, leak report, store, head, predictions. Each command is a process of its
own; `results/scale.json` is written after each number of rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_ext.data import make_demo_encoders

RESULT = Path(__file__).resolve().parent / "results" / "scale.json"
AMINO_ACIDS, LENGTH = "ACDEFGHIKLMNPQRSTVWY", 120


def write_rows(path: Path, num_rows: int) -> None:
    """A sequence and a number that a few of its residues decide, per row."""
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "label"])
        for _ in range(num_rows):
            sequence = "".join(generator.choices(AMINO_ACIDS, k=LENGTH))
            writer.writerow([sequence, round(sequence.count("A") + generator.gauss(0, 0.5), 3)])


def measure(words: str, folder: Path) -> tuple[str, dict[str, float]]:
    """What `hf-ext WORDS` printed, and its seconds and highest memory, in GB.

    Raises:
        SystemExit: it failed.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "hf_ext", *words.split()]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}\n{output[-2000:]}")
    cpu_s, wall_s = used.ru_utime + used.ru_stime, time.perf_counter() - began
    return output, {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1), "peak_gb": round(used.ru_maxrss / 1e6, 2)}


def run(num_rows: int, work: Path) -> dict[str, Any]:
    """Doctor, training and predictions of so many rows."""
    folder = work / f"rows-{num_rows}"
    folder.mkdir(parents=True)
    write_rows(folder / "rows.csv", num_rows)
    _, encoder = make_demo_encoders(folder / "encoders")
    own = f"--dataset_name rows.csv --label_column label --encoders {encoder} --head mlp --num_train_epochs 1"
    own += " --embedding_cache_dir cache --output_dir out --resume no --disable_tqdm true"
    told, doctor = measure(f"doctor {own}", folder)
    words = r"time: (.+?) \(.*host memory: about ([\d.]+) GiB.*embeddings ([\d.]+) ([MG]B)"
    stated = re.search(words, " ".join(told.split()))
    assert stated
    _, train = measure(f"train {own}", folder)
    words = "predict --model out --dataset_name rows.csv --output predicted.csv --embedding_cache_dir another"
    _, predict = measure(words, folder)
    sizes = [path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file()]
    return {
        "rows": num_rows,
        "doctor": doctor,
        "train": train,
        "predict": predict,
        "store_gb": round(sum(sizes) / 1e9, 3),
        "store_files": len(sizes),
        "stated_gb": float(stated[3]) / (1 if stated[4] == "GB" else 1000),
        "stated_memory_gb": round(float(stated[2]) * 2**30 / 1e9, 2),
        "stated_time": stated[1],
        "output_gb": round(sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file()) / 1e9, 3),
    }


def main() -> None:
    """Runs all numbers of rows, fewest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[125_000, 250_000, 500_000, 1_000_000])
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    runs = []
    for num_rows in sorted(given.rows):
        runs.append(run(num_rows, given.work.resolve()))
        print(json.dumps(runs[-1]), flush=True)
        given.output.write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
