"""The demo of recipes/pde_operator.py as a user starts it: it makes its samples, trains, scores. Time and errors.

python benchmarks/pde_demo.py --output benchmarks/results/pde_demo_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "pde_operator.py"


def run(seed: int) -> dict:
    """Wall and CPU seconds of the whole command, and the scores of the test samples."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", str(RECIPE)]
        command += ["--seed", str(seed), "--data_cache_dir", f"{folder}/data", "--disable_tqdm", "true"]
        begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        wall, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        results = json.loads((Path(folder) / "outputs" / "pde_operator" / "all_results.json").read_text())
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    test = results["test"]
    return {"seed": seed, "wall_s": wall, "cpu_s": cpu, "scores": test["scores"], "factors": test["factors"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        runs.append(run(seed))
        result = {"cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS", "torch's choice"), "runs": runs}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(seed, runs[-1]["factors"], round(runs[-1]["wall_s"]), round(runs[-1]["cpu_s"]))


if __name__ == "__main__":
    main()
