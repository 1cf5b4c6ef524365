"""Seconds that commands take, of the processor and by the clock, beside those of imports alone.

From process start to the first step of a run on frozen encoders (the demo with `--head mlp`, since the search for a
head is training too), the demo, loading 131,072 rows of three chains with the leak report, predictions of 20,000 rows
and of ten, and help. Fresh processes that take turns, children included. bitsandbytes is hidden: it is optional, and
PEFT imports it where it is installed.

python benchmarks/command_times.py --output benchmarks/results/command_times_cpu.json
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

from common import interleave, quartiles, run_timed

HIDE = "import sys\nsys.modules['bitsandbytes'] = None\n"
FIRST_STEP = """
import os, sys, tempfile
from hf_ext import FastTrainer, cli
step = FastTrainer.training_step
def step_and_leave(self, *given, **named):
    step(self, *given, **named)
    print("first step", flush=True)
    os._exit(0)
FastTrainer.training_step = step_and_leave
if __name__ == "__main__":
    cli.main(["train", "--output_dir", tempfile.mkdtemp(), "--head", "mlp"])
"""
LOAD = """
from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data
if __name__ == "__main__":
    names = ["heavy", "light", "antigen"]
    args = DataArguments(dataset_name="rows.csv", sequence_columns=names, label_column="pKd")
    assert len(load_data(args, output_dir=None, seed=0).splits["train"]) > 100_000
"""
COMMAND = """
import sys
from hf_ext import cli
if __name__ == "__main__":
    sys.argv[1:] = "{words}".split()
    cli.main()
"""
PROGRAMS = {
    "import torch": "import torch",
    "import transformers.Trainer": "from transformers import Trainer, TrainingArguments",
    "import hf_ext.trainer": "import hf_ext.trainer",
    "first step": FIRST_STEP,
    "first step, accelerate launch": FIRST_STEP,
    "load 131,072 rows, with leaks": LOAD,
    "the demo": COMMAND.format(words="train --output_dir demo --resume no"),
    "predict 20,000 rows": COMMAND.format(words="predict --model demo --dataset_name few.csv --output few_out.csv"),
    "predict 10 rows": COMMAND.format(words="predict --model demo --dataset_name ten.csv --output ten_out.csv"),
    "hf-ext --help": COMMAND.format(words="--help"),
    "hf-ext train --help": COMMAND.format(words="train --help"),
}
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def write_rows(path: Path, num_rows: int) -> None:
    """Variants of eight antibodies and of one antigen, with labels at random; the same in every run."""
    draw = random.Random(0)
    lengths = {"heavy": 120, "light": 108, "antigen": 200}
    parents = {name: ["".join(draw.choices(AMINO_ACIDS, k=n)) for _ in range(8)] for name, n in lengths.items()}
    parents["antigen"] = parents["antigen"][:1]

    def mutate(parent: str) -> str:
        letters = [*parent]
        for place in draw.sample(range(len(letters)), draw.randint(1, 12)):
            letters[place] = draw.choice(AMINO_ACIDS)
        return "".join(letters)

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*lengths, "pKd"])
        for _ in range(num_rows):
            chains = (mutate(draw.choice(parents[name])) for name in lengths)
            writer.writerow([*chains, f"{draw.gauss(7, 1):.3f}"])


def spend(name: str, folder: Path) -> tuple[float, float]:
    """Runs a program; seconds of the processor, and by the clock.

    Raises:
        RuntimeError: it failed, or made no step where it should.
    """
    script = folder / "program.py"
    script.write_text(HIDE + PROGRAMS[name])
    launcher = ["-m", "accelerate.commands.launch", "--quiet", "--cpu"] if "launch" in name else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if not name.startswith(("the demo", "predict", "load")):
        environment["OMP_NUM_THREADS"] = "1"
    run, cpu, clock = run_timed([sys.executable, *launcher, str(script)], cwd=folder, env=environment)
    if run.returncode or ("step" in name and "first step" not in run.stdout):
        raise RuntimeError(f"{name}: exit status {run.returncode}\n{run.stderr[-2000:]}")
    print(f"{name}: {cpu:.2f} s of the processor, {clock:.2f} s", flush=True)
    return cpu, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="beside one in which caches fill")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.csv", 131_072)
        write_rows(folder / "few.csv", 20_000)
        write_rows(folder / "ten.csv", 10)
        found = interleave({what: partial(spend, what, folder) for what in PROGRAMS}, args.rounds)
    rows = []
    for what, seconds in found.items():
        cpu, clock = zip(*seconds)
        rows.append({"what": what, "rounds": args.rounds, "cpu_seconds": quartiles(cpu)})
        rows[-1]["clock_seconds"] = quartiles(clock)
    args.output.write_text(json.dumps({"python": sys.version.split()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
