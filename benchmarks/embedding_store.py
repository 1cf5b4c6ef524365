"""What an embedding store of ten million synthetic sequences takes: to open, in memory, to read from, and in files.

    python benchmarks/embedding_store.py

Shards are written and merged as after encoding, 128 numbers in float32 a sequence; then a process of its own opens the
store and reads rows of all its files, twice. Memory is the peak of opening, all counted, and what the process has for
itself after reading (files that are mapped are the system's). Writes `benchmarks/results/embedding_store.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hf_ext import EmbeddingStore

RESULT = Path(__file__).parent / "results" / "embedding_store.json"
KEY = {"encoder": "synthetic"}
WIDTH, SHARD, ROWS = 128, 100_000, 2000


def name(number: int) -> str:
    """A sequence for each number."""
    return "M" + format(number, "o").translate(str.maketrans("01234567", "ACDEFGHI"))


def memory_mb(field: str) -> float:
    """Memory of this process: "VmHWM", the peak with mapped files, or "RssAnon", now and without them."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1e3


def fill(folder: str, sequences: int) -> dict[str, float]:
    start = time.perf_counter()
    store = EmbeddingStore(folder, KEY)
    for first in range(0, sequences, SHARD):
        numbers = torch.arange(first, min(first + SHARD, sequences))
        store.add([*map(name, numbers.tolist())], numbers[:, None].expand(-1, WIDTH).to(torch.float32))
    store.merge()
    sizes = [path.stat().st_size for path in store.folder.glob("rows-*")]
    return {
        "sequences": len(store),
        "shards_written": -(-sequences // SHARD),
        "fill_s": round(time.perf_counter() - start, 1),
        "files": len(sizes),
        "largest_file_mib": round(max(sizes) / 2**20, 1),
    }


def read(folder: str, sequences: int) -> dict[str, float]:
    peak, own, start = memory_mb("VmHWM"), memory_mb("RssAnon"), time.perf_counter()
    store = EmbeddingStore(folder, KEY)
    opened, peak = time.perf_counter() - start, memory_mb("VmHWM") - peak
    numbers = random.Random(0).sample(range(sequences), ROWS)
    asked, seconds = [*map(name, numbers)], []
    for _ in range(2):
        start = time.perf_counter()
        found = store.gather(asked)
        seconds.append(time.perf_counter() - start)
    if found[:, -1].tolist() != [float(torch.tensor(number, dtype=torch.float32)) for number in numbers]:
        raise RuntimeError("the store gave other rows than were written")
    return {
        "open_s": round(opened, 3),
        "open_mb": round(peak, 1),
        "rows_read": ROWS,
        "first_read_s": round(seconds[0], 2),
        "read_s": round(seconds[1], 3),
        "read_mb": round(memory_mb("RssAnon") - own, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000_000)
    parser.add_argument("--read", help="(of the process that reads) the folder")
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read, args.sequences)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = fill(folder, args.sequences)
        command = [sys.executable, __file__, "--sequences", str(args.sequences), "--read", folder]
        found |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
