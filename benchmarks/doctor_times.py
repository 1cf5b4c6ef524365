"""What the doctor says of time and of the host's memory, beside what the same command takes.

    python benchmarks/doctor_times.py DATA.csv.gz ESM2_FOLDER WORK [--sequence_column sequence] [--label_column label]

DATA has a column `split`. A frozen encoder, LoRA and full fine-tuning of it, masked language modelling of ESM-2 8M from
scratch: each told by `hf-ext doctor` and then run in a process of its own. Writes `results/doctor_times.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scale import measure

from hf_ext.arguments import parse_command
from hf_ext.doctor.command import DoctorArguments, guess_task
from hf_ext.doctor.gather import gather
from hf_ext.doctor.page import format_page
from hf_ext.tasks import find_task

RESULT = Path(__file__).resolve().parent / "results" / "doctor_times.json"
MEASURE_SECONDS = 2.0
RUNS = {
    "frozen": "train --max_train_samples 6000",
    "LoRA, 1 epoch": "train --max_train_samples 3000 --tower_training lora --num_train_epochs 1",
    "full, 1 epoch": "train --max_train_samples 3000 --tower_training full --num_train_epochs 1",
    "masked LM, 1 epoch": "mlm --max_train_samples 4000 --num_train_epochs 1 --model_size esm2_8M",
}


def ask(words: list[str]) -> tuple[list[float], float]:
    """Least and most seconds of the run, and GB of the host's memory."""
    task = guess_task(words)
    found = find_task(task)
    _, (*arguments, args, _) = parse_command((*found.all_arguments, DoctorArguments), found.defaults, "", words)
    facts = gather(task, arguments, args, None, MEASURE_SECONDS)
    assert facts.total_seconds
    page = " ".join(format_page(facts, []).split())
    memory = re.search(r"host memory: about ([\d.]+) GiB", page)
    assert memory
    return [round(each, 1) for each in facts.total_seconds], round(float(memory[1]) * 2**30 / 1e9, 2)


def main() -> None:
    """Asks and runs each, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--sequence_column", default="sequence")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    given.data, given.encoder, given.work = (each.resolve() for each in (given.data, given.encoder, given.work))
    given.work.mkdir(parents=True)  # a new one: what is cached takes no time
    rows: list[dict[str, Any]] = []
    for name, line in RUNS.items():
        command, *words = line.split()
        folder = given.work / name.split(",")[0].replace(" ", "_")
        words += ["--dataset_name", str(given.data), "--sequence_columns", given.sequence_column]
        words += ["--split_column", "split", "--output_dir", str(folder), "--resume", "no", "--disable_tqdm", "true"]
        if command == "train":
            words += ["--label_column", given.label_column, "--encoders", str(given.encoder)]
            words += ["--embedding_cache_dir", str(folder / "cache")]
        with get_context("spawn").Pool(1) as pool:  # whose memory is that of this look alone
            stated, stated_gb = pool.apply(ask, (words,))
        _, took = measure(" ".join([command, *words]), given.work)
        rows.append({"run": name, "stated_s": stated, "clock_s": took["wall_s"], "cpu_s": took["cpu_s"]})
        rows[-1] |= {"stated_gb": stated_gb, "peak_gb": took["peak_gb"]}
        print(json.dumps(rows[-1]), flush=True)
        given.output.write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
