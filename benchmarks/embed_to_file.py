"""What writing adds to encoding: CPU seconds of `hf-ext embed` to HDF5 beside the same packed pass that keeps nothing.

    python benchmarks/embed_to_file.py --encoder FOLDER --dataset_name stability.csv [--num_rows 20000] [--rounds 3]

Both sides are fresh processes and take turns. Encoding alone is `hf_ext.embeddings.fill_store` into a store that
forgets, with the model, kernels and batches of the command. Writes `results/embed_to_file.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
from common import interleave, quartiles, run_timed

RESULT = Path(__file__).resolve().parent / "results" / "embed_to_file.json"
ALONE = """
import sys
import hf_ext.training.embedding_cache as cache
from hf_ext.cli import main
from hf_ext.embeddings import store

class Forgets(store.EmbeddingStore):
    def add(self, sequences, embeddings):
        store.refuse_not_finite(sequences, embeddings, "")
    def gather(self, sequences, out=None):
        raise SystemExit(0)

cache.EmbeddingStore = Forgets
main(sys.argv[1:])
"""


def time_side(words: list[str], folder: Path, alone: bool) -> float:
    """CPU seconds of a process and its children."""
    start = ["-c", ALONE] if alone else ["-m", "hf_ext"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        done, cpu_s, _ = run_timed([sys.executable, *start, "embed", *words, "--output", f"{scratch}/vectors.h5"])
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return cpu_s


def main() -> None:
    """Measures both sides in turn; prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--dataset_name", type=Path, required=True)
    parser.add_argument("--sequence_column", default="sequence")
    parser.add_argument("--num_rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    table = pd.read_csv(given.dataset_name)[[given.sequence_column]].drop_duplicates().head(given.num_rows)
    with tempfile.TemporaryDirectory() as folder:
        table.rename(columns={given.sequence_column: "sequence"}).to_csv(f"{folder}/rows.csv", index=False)
        words = ["--encoder", given.encoder, "--dataset_name", f"{folder}/rows.csv", "--use_cpu", "--disable_tqdm"]
        # Whether float32 products go to oneDNN is measured at each start, and both sides shall have the same.
        words += ["--without", "cpu_matmul"]
        sides = {"alone": True, "to HDF5": False}
        run = {name: partial(time_side, words, Path(folder), alone) for name, alone in sides.items()}
        found = interleave(run, given.rounds)
    result = {"num_rows": len(table), "rounds": given.rounds, "encoder": Path(given.encoder).name}
    result["num_residues"] = int(table[given.sequence_column].str.len().sum())
    result["cpu_s"] = {name: quartiles(each) for name, each in found.items()}
    result["ratio"] = quartiles([both / alone for both, alone in zip(found["to HDF5"], found["alone"])], 3)
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
