"""What recipes/generate_antibody.py makes of real pairs: gates, scores with intervals, baselines, cost.

python benchmarks/generator_runs.py PAIRS ENCODER WORK [--only "LSTM tiny, stage 1"] [--limit_s 3600]
    [--affinities TABLE --discriminator FOLDER]

PAIRS is a table with columns antigen, heavy, light, antigen_cluster and split_antigen (train, validation, test, by
cluster of antigens); ENCODER a folder of ESM-2 8M. TABLE has antigen, heavy, light, pKd and split_random; FOLDER is a
model of recipes/max_speed.py, trained on the same split of it. Runs go to WORK one after the other, each in a process
of its own; `results/generator_runs.json` is written after each. A run whose gates fail is a result like any other.
`--judge_again` trains nothing: finished runs in WORK are sampled and judged once more, as the recipe does it now and as
`--words` say (`--temperature 1`); what they cost is what their training cost. With a LABEL in an entry of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "generator_runs.json"
GATES_FAILED = 1  # exit status of a run that wrote everything, and did not reach its gates
MODELS = {
    "LSTM tiny": "--architecture lstm --size tiny",
    "LSTM small": "--architecture lstm --size small",
    "Transformer tiny": "--architecture transformer --size tiny",
    "Transformer small": "--architecture transformer --size small",
    "frozen ESM-2 8M, tiny decoder": "--architecture esm --size tiny --antigen_encoder {encoder} "
    "--max_residues 1022 --bad_rows drop",  # as many as it takes
}
PAIRS = "--dataset_name {pairs} --split_column split_antigen --group_column antigen_cluster"
AFFINITIES = (
    "--dataset_name {affinities} --split_column split_random --label_column pKd --discriminator {discriminator}"
)
# Name -> model, what else is said.
RUNS = {
    **{f"{model}, stage 1": (model, f"{PAIRS} --stage 1") for model in MODELS if model != "LSTM small"},
    **{f"{model}, stage 2": (model, f"{PAIRS} --stage 2") for model in MODELS},
    "LSTM tiny, affinities, stage 1": ("LSTM tiny", f"{AFFINITIES} --stage 1"),
    "LSTM small, affinities, stage 2": ("LSTM small", f"{AFFINITIES} --stage 2"),
}
EFFECT = ("condition", "reading", "text", "comparison")


def run_once(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own: what it scored, what its gates say, and what it cost."""
    model, words = RUNS[name]
    out = args.work / name.replace(" ", "_").replace(",", "")
    command = [sys.executable, str(ROOT / "recipes" / "generate_antibody.py")]
    command += [word.format(**vars(args)) for word in [*MODELS[model].split(), *words.split()]] + args.words.split()
    resume = "no" if args.judge_again is None else "auto"
    command += ["--seed", str(args.seed), "--output_dir", str(out), "--disable_tqdm", "true", "--resume", resume]
    command += ["--embedding_cache_dir", str(args.work / "cache"), "--data_seed", "42"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode and not (done.returncode == GATES_FAILED and "GatesFailed" in done.stderr):
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip().splitlines()[-1]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "run": name,
        "model": model,
        "seed": args.seed,
        "words": " ".join([words[words.index("--stage") :], args.words]).strip(),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_s": time.perf_counter() - began,
        **read_results(json.loads((out / "all_results.json").read_text())),
    }


def read_results(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept of `all_results.json`."""
    found = results["generation"]
    return {
        "num_parameters": results["model"]["num_parameters"],
        "sizes": results["data"]["sizes"],
        "num_antigens": results["data"]["num_antigens"],
        "train": {key: results["train"].get(key) for key in ("epoch", "train_runtime", "train_residues_per_s")},
        "validation_token_loss": results["best"]["token_loss"],
        "train_token_loss": found["train_token_loss"],
        "verdict": results["verdict"]["text"],
        "outcome": results["verdict"]["outcome"],
        "gates": results["gates"],
        "effects": [{key: effect[key] for key in EFFECT} for effect in found["effects"]],
        "reproduced": found["reproduced"],
        "discriminator": found.get("discriminator"),
        "sets": {name: read_set(scores) for name, scores in found["sets"].items()},
        "comparisons": {
            what: {who: {key: one[key] for key in ("improvement", "low", "high")} for who, one in both.items()}
            for what, both in found["comparisons"].items()
        },
    }


def read_set(scores: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Every score of one set of antibodies that has an interval, by its name: `validity.strict`, `humanness`."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in scores.items():
        if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
            found[prefix + name] = {key: value[key] for key in ("value", "low", "high", "n")}
        elif isinstance(value, dict):
            found |= read_set(value, f"{prefix}{name}.")
    return found


def main() -> None:
    """Runs what is asked for, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pairs", "encoder", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--affinities", type=Path)
    parser.add_argument("--discriminator", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*RUNS], help="default: all; those of affinities where given")
    parser.add_argument("--words", default="", help="more words of the recipe's, the same for all runs")
    parser.add_argument("--judge_again", nargs="?", const="", metavar="LABEL", help="what stands behind their names")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--limit_s", type=float, default=float("inf"), help="begin no run after so long")
    args = parser.parse_args()
    began = time.perf_counter()
    done = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    possible = [name for name in RUNS if args.affinities or AFFINITIES not in RUNS[name][1]]
    for name in args.only or possible:
        before = next((one for one in done if (one["run"], one["seed"]) == (name, args.seed)), None)
        if (before is None) != (args.judge_again is None) or time.perf_counter() - began > args.limit_s:
            continue
        found = run_once(name, args)
        if before is not None:
            found |= {"run": name + args.judge_again, **{key: before[key] for key in ("cpu_s", "wall_s", "train")}}
        done = [one for one in done if (one["run"], one["seed"]) != (found["run"], args.seed)] + [found]
        args.output.write_text(json.dumps({"runs": done}, indent=1) + "\n")
        print(f"{name}: {done[-1]['verdict']} ({done[-1]['cpu_s']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
