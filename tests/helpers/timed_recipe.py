"""A recipe for comparisons that trains nothing: it writes the files of a run whose steps take as long as it is told.

    python timed_recipe.py --seconds 0.5 --rows 8 --passes 2 --output_dir FOLDER [--crash true]

Every start adds a line to `calls.txt` in the working folder. A key of `--config` stands for an argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_STEPS = 20


def read_arguments(words: list[str]) -> dict[str, str]:
    """Name -> value; of lists all values in one text. The command line wins over `--config`."""
    given: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            given[name] = ""
        else:
            given[name] = f"{given[name]} {word}".strip()
    if "config" in given:
        lines = Path(given["config"]).read_text().splitlines()
        given = {**dict(line.split(": ", 1) for line in lines if line), **given}
    return given


def main() -> None:
    given = read_arguments(sys.argv[1:])
    folder = Path(given["output_dir"])
    with Path("calls.txt").open("a") as file:
        file.write(f"{folder.parent.name}/{folder.name}\n")
    if given.get("crash") == "true":
        sys.exit("row 7: no sequence")
    rows, passes, num_steps = (int(given.get(key, x)) for key, x in (("rows", 4), ("passes", 1), ("steps", NUM_STEPS)))
    seconds, per_step = float(given.get("seconds", 1)) * rows * passes / 4, rows * passes
    speedups = given.get("speedups", "").split()
    steps = {
        "seconds": [seconds] * num_steps,
        "cpu_seconds": [float(given.get("processor", seconds / 2))] * num_steps,
        "residues": [25.0 * per_step] * num_steps,
        "sequences": [float(per_step)] * num_steps,
    }
    logs = [{"loss": 3 - i / num_steps + float(given.get("worse", 0)), "step": i + 1} for i in range(num_steps)]
    throughput = {
        "unit": "residues",
        "device": "cpu",
        "num_processes": 1,
        "measured_steps": num_steps,
        "warmup_steps": 0,
        "warmup_seconds": 0.0,
        "peak_memory_gib": float(given.get("memory", 1)),
        "rates": {"residues_per_s": 25.0 * per_step / seconds, "data_wait_share": 0.0},
        "step_seconds": {"q1": seconds, "median": seconds, "q3": seconds},
        "steps": steps,
        "log_history": [*logs, {"train_runtime": num_steps * seconds + float(given.get("evaluation", 0))}],
    }
    decisions = [{"name": one, "status": "applied", "reason": "-", "evidence": {}} for one in speedups]
    for one in decisions:
        if one["name"] == "tf32":
            one |= {"status": "skipped", "reason": "no tensor cores"}
    arguments = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    results = {"score": {"value": float(given.get("seed", 0))}}
    named = {"throughput": throughput, "plan": {"decisions": decisions}, "training_args": arguments}
    for name, content in {**named, "all_results": results}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
