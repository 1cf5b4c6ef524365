"""Tables from the JSON files of benchmarks/results/: a function each. The scripts of some are gone (README.md here)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import common
import numpy as np
from gpu_tables import parts_table, speed_table

from hf_ext.text import format_markdown_table as table

RESULTS = Path(__file__).resolve().parent / "results"
Rows = list[list[str]]
SCHMIRLER = "Schmirler et al., Nature Communications 2024"
PUBLISHED = {  # set of default_runs.json -> metric, what is published of frozen and of fine-tuned encoders, by whom
    "gb1": ("spearman", "0.818 +- 0.004", "0.883 +- 0.010", SCHMIRLER),
    "stability": ("spearman", "0.750 +- 0.020", "0.765 +- 0.020", SCHMIRLER),
    "secondary structure": ("accuracy", "0.753", "0.761", SCHMIRLER),
    "remote homology": ("accuracy", "-", "0.21 (another transformer)", "TAPE, Rao et al. 2019"),
    **dict.fromkeys(
        (
            "gb1, low against high",
            "gb1, up to two against more mutations",
            "beta-lactamase",
            "beta-lactamase, positions",
        ),
        ("spearman", "-", "-", "none of this encoder found"),
    ),
    "signal peptide": ("mcc", "-", "-", "none of this encoder found"),
}
OF_FEW = {  # predictors of a run on few labels -> as the table calls them
    "model": "default",
    "one-hot ridge": "one-hot ridge",
    "3-mer ridge": "3-mer ridge",
    "ridge on substitutions": "substitutions",
    "zero-shot scores": "zero-shot",
    "ridge on embeddings": "embeddings",
    "kernel ridge on embeddings": "kernel, embeddings",
}


def read(name: str) -> Any:
    """The result of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def interval(score: dict[str, Any]) -> str:
    return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**score)


def times(ratio: dict[str, Any]) -> str:
    return "{value:.2f}x [{low:.2f}, {high:.2f}]".format(**ratio)


def quartiles(found: list[float], digits: int = 2) -> str:
    return "{1:.{d}f} [{0:.{d}f}, {2:.{d}f}]".format(*found, d=digits)


def mean_and_spread(values: list[float], digits: int = 3) -> str:
    return f"{mean(values):.{digits}f}" + (f" +- {stdev(values):.{digits}f}" if len(values) > 1 else "")


# --- affinity -------------------------------------------------------------------------------------------------------


def embed_once() -> str:
    result, floor = read("embed_once_omicron"), read("one_hot_ridge_omicron")["scores"]["spearman"]
    slow, fast = result["slow"], result["fast"]
    cached = f"{fast['epoch_at_loop_batch_seconds']:.0f} s ({result['epoch_speedup_at_loop_batch']:.0f}x)"
    whole = f"{fast['whole_run_seconds'] / 60:.1f} min ({result['whole_run_speedup']:.0f}x)"
    rows = [
        [
            "every row through the encoders, one sequence at a time",
            f"{slow['epoch_seconds'] / 3600:.1f} h (scaled from {slow['num_rows']:,} rows)",
            f"{slow['whole_run_days']:.1f} days",
            "not measured",
        ],
        [f"embedded once, then batches of {slow['batch_size']}", cached, "-", "-"],
        [
            f"embedded once, then batches of {fast['batch_size']} (`max_speed`)",
            "-",
            whole,
            interval(fast["test"]["scores"]["model"]["spearman"]),
        ],
        ["for comparison, no encoder: one-hot ridge per antibody", "-", "-", interval(floor)],
    ]
    epochs = f"{int(result['num_epochs'])} epochs, all included"
    return table(rows, ["", "one epoch", epochs, "test Spearman [95 %]"])


def default_runs() -> str:
    """Runs without settings on labels that are numbers, beside their best baselines: one row per set."""
    return _default_table({"spearman": ("Spearman", max), "rmse": ("RMSE", min)})


def default_classes() -> str:
    """The same on labels that are classes."""
    return _default_table({"mcc": ("MCC", max), "accuracy": ("accuracy", max)})


def secondary_structure() -> str:
    """A class for each residue, with encoders frozen and trained."""
    rows = []
    for run in read("secondary_structure")["runs"]:
        found = run["scores"]["model"]
        scores = [interval(found[metric]) for metric in ("accuracy", "mcc", "log_loss")]
        rows.append([run["side"], f"{run['proteins']['train']:,}", *scores, f"{run['cpu_s'] / 60:.0f} min"])
    return table(rows, ["encoder", "training proteins", "accuracy", "MCC", "log loss", "CPU time"])


def replay() -> str:
    """Hits after each round of measurements, by how the next batch is chosen, and how good its spread was."""
    sets: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in read("replay")["runs"]:
        sets.setdefault((run["data"], run["strategy"]), []).append(run)
    rows = []
    for (name, strategy), runs in sets.items():
        counts = [mean_and_spread([run["hits"][i] for run in runs], 1) for i in range(len(runs[0]["hits"]))]
        spreads = [spread for run in runs for spread in run["spreads"]]
        off = f"{mean(one['calibration_error'] for one in spreads):.2f}" if spreads else "-"
        known = [one["spearman"] for one in spreads if one["spearman"] is not None]
        cells = [off, f"{mean(known):.2f}" if known else "-"]
        rows.append([f"{name}, {runs[0]['num_hits']} hits", strategy, len(runs), *counts, *cells])
    rounds = [f"round {i}" for i in range(1, len(rows[0]) - 5)]
    return table(rows, ["set", "next batch", "draws", "start", *rounds, "calibration error", "Spearman with errors"])


def windows() -> str:
    """Proteins above a limit that was made small: cut, in windows, and read whole; the difference, row by row."""
    found = read("windows")
    sets: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        sets.setdefault(run["data"], []).append(run)
    rows = []
    for name, runs in sets.items():
        (metric, *_) = runs[0]["scores"]
        cells = [
            mean_and_spread([run["scores"][metric] for run in runs if run["way"] == way])
            for way in ("truncate", "window", "as they are")
        ]
        pairs = [one for one in found["paired"] if (one["data"], one["against"]) == (name, "truncate")]
        gains = "; ".join("{improvement:+.3f} [{low:+.3f}, {high:+.3f}]".format(**one) for one in pairs)
        rows.append([name, metric, *cells, gains])
    return table(rows, ["data", "metric", "cut", "in windows", "whole", "windows less cut, by seed"])


def few_labels() -> str:
    """Spearman on few labels: as they are, by likelihood, and baselines; means over draws, a constant counts as 0."""
    sets: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in read("few_labels")["runs"]:
        sets.setdefault((run["data"], run["labels"]), []).append(run)
    rows = []
    for (name, num), runs in sets.items():
        own = [run["scores"] for run in runs if run["side"] == "default"]
        other = [run["scores"]["model"]["spearman"] for run in runs if run["side"] == "likelihood"]
        of = {who: [one[who]["spearman"] or 0.0 for one in own if who in one] for who in OF_FEW}
        cells = [mean_and_spread(values) if values else "-" for values in of.values()]
        rows.append([name, num, len(own), *cells, mean_and_spread(other) if other else "-"])
    return table(rows, ["data", "labels", "draws", *OF_FEW.values(), "likelihood"])


def whole_command() -> str:
    """Whole runs beside other ways to the same: seconds, score, and of ours the phases that take a CPU second."""
    sides: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in read("whole_command")["runs"]:
        sides.setdefault((run["data"], run["side"]), []).append(run)
    rows = []
    for (name, side), runs in sides.items():
        took = [quartiles(common.quartiles([run[unit] for run in runs], 0), 0) for unit in ("cpu_s", "wall_s")]
        phases = {what: median(run["phases"][what]["cpu_s"] for run in runs) for what in runs[0].get("phases", ())}
        where = ", ".join(f"{what} {value:.0f}" for what, value in phases.items() if value >= 1)
        score = f"{runs[0]['metric']} {median(run['score'] for run in runs):.3f}"
        rows.append([name, side, len(runs), *took, score, where or "-"])
    return table(rows, ["data", "side", "rounds", "CPU s", "s", "score", "CPU s by phase"])


def published() -> str:
    """What others report of ESM-2 8M on the same splits, beside runs without a setting, encoder frozen."""
    rows = []
    for name, (metric, frozen, tuned, source) in PUBLISHED.items():
        runs = [one for one in read("default_runs")["runs"] if (one["data"], one["asked"]) == (name, "auto")]
        own = mean_and_spread([run["scores"]["model"][metric]["value"] for run in runs])
        rows.append([name, metric, frozen, tuned, own, f"{median(run['cpu_s'] for run in runs):.0f} s", source])
    return table(
        rows, ["data", "metric", "published, frozen", "published, fine-tuned", "ours, frozen", "CPU time", "source"]
    )


def folds_and_seeds() -> str:
    """Five folds by three seeds: scores over all rows, of single models, and how far folds and seeds differ."""
    rows = []
    for name, one in read("folds_and_seeds")["sets"].items():
        metrics = ("spearman", "rmse") if "spearman" in one["scores"]["model"] else ("accuracy", "mcc")
        for metric in metrics:
            spread = one["repeats"]["spread"][metric]
            single = [f"{spread[key]:.3f}" for key in ("mean", "std_folds", "std_seeds", "std")]
            known = [both[metric]["value"] for who, both in one["scores"].items() if who != "model"]
            best = (min if metric == "rmse" else max)(value for value in known if value is not None)
            whole = interval(one["scores"]["model"][metric])
            rows.append(
                [name, f"{one['rows']:,}", metric, whole, f"{best:.3f}", *single, f"{one['cpu_s'] / 60:.0f} min"]
            )
    headers = [
        "data",
        "rows",
        "metric",
        "all rows, mean of seeds",
        "best baseline",
        "one model",
        "folds",
        "seeds",
        "both",
    ]
    return table(rows, [*headers, "CPU time"])


def _default_table(metrics: dict[str, tuple[str, Callable[..., Any]]]) -> str:
    sets: dict[str, list[dict[str, Any]]] = {}
    for run in read("default_runs")["runs"]:
        if run["scores"]["model"].keys() == metrics.keys():
            sets.setdefault(run["data"], []).append(run)
    rows = []
    for name, several in sets.items():
        own = [run for run in several if run["asked"] == "auto"]
        large = next((run for run in several if run["asked"] == "mlp"), None)
        cells = [name, len(own), f"{own[0]['sizes']['train']:,} / {own[0]['sizes']['test']:,}"]
        for metric, (_, best) in metrics.items():
            cells.append(mean_and_spread([run["scores"]["model"][metric]["value"] for run in own]))
            cells.append(_best_baseline(own[0]["scores"], metric, best))
            cells.append(f"{large['scores']['model'][metric]['value']:.3f}" if large else "-")
        cells.append(_count_verdicts(own))
        cpu = median(run["cpu_s"] for run in own)
        rows.append([*cells, f"{cpu:.0f} s" + (f" / {large['cpu_s']:.0f} s" if large else "")])
    headers = [word for title, _ in metrics.values() for word in (title, "best baseline", "`--head mlp`")]
    return table(rows, ["data", "seeds", "rows, train / test", *headers, "verdicts", "CPU time / of `--head mlp`"])


def _count_verdicts(runs: list[dict[str, Any]]) -> str:
    """Most frequent first: "worse" is said where the interval of the difference says it."""
    is_worse = [(run["verdict"]["comparison"] or {}).get("is_worse") for run in runs]
    outcomes = Counter("worse" if worse else run["verdict"]["outcome"] for worse, run in zip(is_worse, runs))
    return ", ".join(f"{outcome} {number}" for outcome, number in outcomes.most_common())


def _best_baseline(found: dict[str, Any], metric: str, best: Callable[..., Any]) -> str:
    others = {name: both[metric]["value"] for name, both in found.items() if name != "model"}
    name = best((name for name, value in others.items() if value is not None), key=others.__getitem__)
    return f"{others[name]:.3f} ({name})"


_COLUMNS = [("model", "spearman"), ("ridge on embeddings", "spearman"), ("model", "rmse")]
_COLUMNS += [("ridge on embeddings", "rmse"), ("training mean", "rmse")]


def scores() -> str:
    """Test scores of every data set under `results/<name>_seed<k>.json`, mean and spread over seeds."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*_seed[0-9].json")):
        sets.setdefault(path.stem.rpartition("_seed")[0], []).append(json.loads(path.read_text()))
    rows = [
        [name, str(len(runs)), f"{runs[0]['test']['num_rows']:,}", *(_over_seeds(runs, *one) for one in _COLUMNS)]
        for name, runs in sets.items()
    ]
    return table(rows, ["data", "seeds", "test rows", *(f"{metric}, {who}" for who, metric in _COLUMNS)])


def _over_seeds(runs: list[dict[str, Any]], who: str, metric: str) -> str:
    is_frozen = any(d["name"] == "embedding_cache" and d["status"] == "applied" for d in runs[0]["decisions"])
    if who == "ridge on embeddings" and not is_frozen:
        return "-"  # embeddings of an encoder that trained are no baseline
    values = [run["test"]["scores"][who][metric]["value"] for run in runs]
    return mean_and_spread(values if who == "model" else values[:1])


# --- comparisons ----------------------------------------------------------------------------------------------------


def compare(name: str = "compare_mlm_8M_cpu") -> str:
    """One row per side, the optimized side last."""
    result = read(name)
    rows: Rows = []
    for side_name, side in result["sides"].items():
        if side["role"] not in ("baseline", "optimized"):
            continue
        pair = result["against"].get(side_name)
        step, loss = side["step_seconds"], pair and pair["loss"]  # numbers in results of today, a dictionary in older
        numbers = [
            f"{side['rate']['value']:,.0f}",
            f"{1000 * (step['median'] if isinstance(step, dict) else step):,.0f}",
        ]
        ratio = [times(pair["ratio"]), f"{loss.get('final', loss.get('value')):+.4f}"] if pair else ["-", "-"]
        rows.append([side_name, *numbers, f"{side['peak_memory_gib']:.2f}", *ratio])
    headers = ["side", "real residues / s", "median step, ms", "peak memory, GiB"]
    return table(rows, [*headers, f"{result['optimized']} is", "its final loss"])


def progression(name: str) -> str:
    """Phases of a list of speed-ups, each on top of those before it, beside what the list claims."""
    result = read(name)
    if "against" in result:  # comparison.json of `hf-ext compare --progression`
        return progression_here(result)
    rows = []
    for phase in result["phases"]:
        claimed = "-".join(f"{end:g}" for end in dict.fromkeys(phase["claimed"] or [])) or "-"
        if "not_measured" in phase:
            rows.append([phase["name"], claimed, f"not measured: {phase['not_measured']}", "-", "-"])
            continue
        of_loop = " of the whole run" if phase["judged_by"] == "loop" else ""
        loss = f"{phase['loss_delta']:+.1e}" if phase["same_rows_per_step"] else "other rows per step"
        rows.append([phase["name"], claimed, times(phase["speedup"]) + of_loop, times(phase["cumulative"]), loss])
    whole = result["whole"]
    claimed = "-".join(f"{end:g}" for end in dict.fromkeys(whole["claimed"]))
    rows.append([f"**{whole['phases']} phases together**", claimed, times(whole["speedup"]), "", ""])
    return table(
        rows, ["phase", "claimed, times", "here, over the phase before", "over the baseline", "its final loss"]
    )


def progression_here(result: dict[str, Any]) -> str:
    """The same of what `hf-ext compare --progression` writes."""
    base = result["sides"]["base"]
    rows = []
    for phase in result["phases"]:
        claimed = "-".join(f"{end:g}" for end in phase["claimed"]) or "-"
        side = result["sides"].get(phase["name"])
        if side is None:
            rows.append([phase["name"], claimed, phase["note"], "-", "-"])
            continue
        loss = f"{side['final_loss']['value'] - base['final_loss']['value']:+.1e}"
        is_same = side["sequences_per_step"] == base["sequences_per_step"]
        factors = [times(side["factor"]), times(side["so_far"])]
        rows.append([phase["name"], claimed, *factors, loss if is_same else "other rows per step"])
    return table(
        rows, ["phase", "claimed, times", "here, over the phase before", "over the baseline", "its final loss"]
    )


def same_numbers() -> str:
    """Several processes against one: the largest difference over the cases of each way to share the work."""
    found, rows = read("same_numbers")["rows"], []
    for name in dict.fromkeys(row["processes"] for row in found):
        cases = [row for row in found if row["processes"] == name]
        worst = [max(row[key] for row in cases) for key in ("loss", "weights")]
        seen = [f"{value:.0e}" if value else "0" for value in worst]
        rows.append([name, ", ".join(row["case"] for row in cases), *seen])
    return table(rows, ["against one process", "cases", "largest difference of a loss", "of a weight"])


# --- robustness and evaluation --------------------------------------------------------------------------------------


# What was done, the suite in results/faults, how often, what became of it.
FAULTS = [
    (
        *("a file of a checkpoint missing, cut, flipped, swapped", "damaged_checkpoints", "{cases} cases"),
        "{found_and_passed_over} found before a tensor was loaded, the one before taken",
    ),
    (
        *("the same, stock Trainer", "damaged_checkpoints_of_stock_Trainer", "{cases} cases"),
        "{failed} failed, {silently_wrong} silently wrong",
    ),
    (
        *("disk full, quota, read-only, I/O errors", "disk_full", "{cases} cases"),
        "{crashes} crashes; {resumed} resumed, {identical} identical",
    ),
    (
        *("`--save_total_size_gb`, sampled every ms", "disk_budget", "{saves:,} saves, {samples:,} samples"),
        "{above the budget} above the budget",
    ),
    (
        *("SIGTERM, SIGINT, time limits", "stops_by_signal_and_time", "{cases} cases"),
        "{identical} continued bit-identical",
    ),
    (
        *("killed between saves: map, streams, packed, cached, ...", "resume_equality", "{cases} cases"),
        "{identical} bit-identical: weights, losses, rows",
    ),
    (
        *("NaN and infinity", "numbers_that_are_not_finite", "{cases} cases"),
        "{right} stopped or left out, none saved",
    ),
    ("foreign, stale, linked folders", "stale_folders", "{cases} cases", "{right} right, none touched"),
    (
        *("two runs given one folder, 0 to 3 s apart", "two_runs_in_one_folder", "{pairs} pairs"),
        "{one_refused} times one refused, {other_unharmed} times the other unharmed",
    ),
    (
        *("mutated CSV and TSV files, against a second reader", "mutated_tables", "{files:,} files"),
        "{refused} refused, the others read line by line; {silent_differences} silent differences",
    ),
    (
        *("damaged Parquet files", "damaged_Parquet_files", "{files} files"),
        "{named} named, {read right} read right; {changed values that only checksums show} held other values, "
        "which only page checksums show",
    ),
    (
        *("hostile files", "hostile_files", "{probes} probes"),
        "{executed} executed, {escaped} left the folder; no pickle or token written",
    ),
]


def faults() -> str:
    """What was done to runs, and what became of them; one row per suite of `tests/faults` and the like."""
    suites = {path.stem: json.loads(path.read_text()) for path in (RESULTS / "faults").glob("*.json")}
    full, stall = suites["disk_full"], read("checkpoint_stall")
    full["cases"] = sum(full[name] for name in ("tmpfs sizes", "file size limits", "injected errors", "others"))
    killed = suites["kill_training"]["rows"]
    stock = [row for row in killed if row["family"].startswith("stock")]
    often, became = _kills([row for row in killed if row not in stock])
    rows = [
        [
            "kill -9 in a save, a rotation, a re-save; at every file operation",
            often,
            f"{became}; at most one save interval and a step lost",
        ],
        ["kill -9 of runs with data workers, at any moment", *_kills(suites["kill_with_workers"]["rows"])],
    ]
    for row in stock:
        lost, wrong = row["kills"] - row["resumed"], row["resumed"] - row["identical"]
        became = f"{lost} could not continue, {wrong} continued silently wrong"
        rows.append(["{family}, {kind}".format(**row), f"{row['kills']} kills", became])
    for what, suite, often, became in FAULTS:
        rows.append([what, often.format(**suites[suite]), became.format(**suites[suite])])
    became = f"training stands still {stall['ratio']:.2f}x as long as with stock Trainer"
    rows.append([f"a save of {stall['megabytes']['fast']:.0f} MB", f"{stall['num_saves']} saves a side", became])
    return table(rows, ["what", "how often", "what became of it"])


def _kills(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """How many kills of how many kinds of run, and what became of them."""
    kills, resumed, identical = (sum(row[key] for row in rows) for key in ("kills", "resumed", "identical"))
    often = f"{kills} kills of {len({row['family'] for row in rows})} kinds of run"
    return often, f"{resumed} continued, {identical} ended bit-identical"


def evaluation() -> str:
    """What stops a run too early, and once it has ended."""
    stops = read("false_stops")
    rule, curves = stops["paired_rule"], f"{stops['settings']['num_curves']} simulated curves that still rise"
    ends = "; ".join(
        f"{kind} {counts['num_stopped']} of {counts['num_stopped'] + counts['num_not_stopped']}"
        for kind, counts in rule["after_training_ended"].items()
    )
    rows = [
        ["stops too early: patience on the best score", curves, f"{stops['patience']['share_false_stops']:.1%}"],
        ["stops too early: `--early_stopping_patience`", curves, f"{rule['share_false_stops']:.1%}"],
        ["stops once training has ended", "scores that settle, overfit, or stay while predictions move", ends],
    ]
    return table(rows, ["what", "how often", "result"])


# --- speed and memory -----------------------------------------------------------------------------------------------


def activation_checkpointing() -> str:
    """Bytes and CPU time of layers that are computed again, over those of a pass that keeps all."""
    rows = []
    for row in read("activation_checkpointing_cpu")["rows"]:
        cells = [f"{row['kept_mb']:,.0f} MB", f"{row['most_mb']:,.0f} MB", f"{row['cpu_ms'][1]:,.0f} ms"]
        if row["policy"] != "none":
            shares = [f"{row[name]:.2f}" for name in ("kept_over_none", "most_over_none")]
            cells = [*shares, quartiles(row["cpu_over_none"])]
        shape = f"{row['model']}, {row['layout']}, {row['tokens']:,} tokens"
        again = {"none": "no", "full": "all", "feed_forward": "feed-forward"}.get(row["policy"], row["policy"])
        rows.append([shape, again, *cells, str(row["rounds"])])
    headers = ["ESM-2's shape, bf16", "again", "kept for backward", "most at a time", "CPU time of a pass", "rounds"]
    return table(rows, headers)


def element_wise() -> str:
    """What a layer moves beside products and attention, counted."""
    found = read("element_wise")["rows"]
    stock = found[0]["bytes_per_token"]
    rows = [
        [row["side"], f"{size / 1000:,.0f} kB", f"{size / stock:.0%}", str(row["kernels"])]
        for row, size in ((row, row["bytes_per_token"]) for row in found)
    ]
    return table(rows, ["a layer of ESM-2 650M, bf16", "per token", "share", "kernels"])


def plan_cost() -> str:
    """Small models that no speed-up is for: what the constructor and a step take, beside stock Trainer."""
    rows = []
    for model, sides in read("plan_cost")["models"].items():
        for side, took in sides.items():
            build, step = quartiles(took["constructor_s"]), quartiles(took["step_ms"])
            rows.append([model, side, build, step, quartiles(took["step_ratio"])])
    return table(rows, ["model", "side", "constructor, s", "step, ms", "times stock's step"])


def plan_products() -> str:
    """What a plan leaves small models without: a step of two linear layers by the precision of their products."""
    found = read("plan_cost")["products"]
    rows = [
        [n, f"{one['mflop']:.3g}", *(quartiles(took, 0) for took in one["step_us"].values())]
        for n, one in found.items()
    ]
    return table(rows, ["two linear layers", "MFLOP forward", "float32, us", "oneDNN, us", "bf16, us"])


def cpu_encoding() -> str:
    """Encoding by frozen encoders on a CPU, by the precision of their products."""
    rows = []
    for found in read("cpu_encoding")["rows"]:
        known = "noise_share" in found
        quality = [f"{found['noise_share']:.1%}", f"{found['lowest_cosine']:.5f}"] if known else ["not measured"] * 2
        speeds = (quartiles(found[unit], 1) for unit in ("rows_per_s", "rows_per_cpu_s"))
        rows.append([found["size"], found["threads"], found["side"], *speeds, *quality])
    unit = "sequences a second"
    return table(rows, ["ESM-2", "threads", "products", unit, f"{unit} of a core", "noise", "lowest cosine"])


def int8_noise() -> str:
    """What rounding leaves of trained encoders' embeddings."""
    sides, rows = ("bfloat16", "int8", "int8, smoothed"), []
    for row in read("int8_noise")["rows"]:
        other = row.get("esm_cpp")
        counts = "{} / {} of {}".format(*other["nan"], row["sequences"]) if other else "not measured"
        rows.append([row["data"], row["encoder"], *(f"{row['noise_share'][side]:.1%}" for side in sides), counts])
    return table(rows, ["data", "encoder", *sides, "NaN of esm-cpp, float32 / int8"])


def cpu_step() -> str:
    """A step and an encoding pass on one core, and how many times their own products and the roofline they take."""
    rows = []
    for found in read("cpu_step")["rows"]:
        cells = [found["batch"], found["side"]]
        for what in ("step", "encoding"):
            cells.append(f"{quartiles(found[f'{what}_cpu_s'])} s, {quartiles(found[f'{what}_over_all'])}x")
            cells.append(quartiles(found[f"{what}_over_products"]))
        rows.append([*cells, quartiles(found["step_over_roofline"]), f"{found['step_faults'][1]:,.0f}"])
    names = ["residues", "side", "step", "times its products", "encoding", "times its products"]
    return table(rows, [*names, "step, times its roofline", "page faults a step"])


def scale() -> str:
    """What runs take by the number of rows, and a line through that; memory is the highest of the process."""
    runs = read("scale")["runs"]
    parts = [(name, what) for name in ("doctor", "train", "predict") for what in ("cpu_s", "peak_gb")]
    values = [[run["rows"], *(run[name][what] for name, what in parts), run["store_gb"]] for run in runs]
    line = np.polynomial.Polynomial.fit
    most = [10 * runs[-1]["rows"]]
    most += [float(line([row[0] for row in values], column, 1)(most[0])) for column in [*zip(*values)][1:]]
    told = [f"{run['stated_time']}, {run['stated_memory_gb']:.1f} GB, {run['stated_gb']:.2f} GB" for run in runs]
    rows = []
    for row, stated in zip([*values, most], [*told, "-"]):
        cells = [f"{row[i]:,.0f} s, {row[i + 1]:.1f} GB" for i in (1, 3, 5)]
        rows.append([f"{row[0]:,}" + (", by a line" if row is most else ""), *cells, f"{row[7]:.2f} GB", stated])
    names = [
        "rows",
        "doctor: CPU time, memory",
        "train, one epoch",
        "predict",
        "embeddings on disk",
        "said of training",
    ]
    return table(rows, names)


def doctor_times() -> str:
    """What the doctor said of runs before they ran."""
    rows = []
    for row in read("doctor_times")["rows"]:
        stated = "{:.0f} to {:.0f}".format(*row["stated_s"])
        rows.append([row["run"], stated, f"{row['clock_s']:.0f}", f"{row['stated_gb']:.1f}", f"{row['peak_gb']:.1f}"])
    return table(rows, ["run", "seconds, stated", "taken", "memory in GB, stated", "taken"])


def command_times() -> str:
    """What commands take, by the clock and of the processor."""
    found = read("command_times_cpu")["rows"]
    rows = [[row["what"], *(quartiles(row[unit], 1) for unit in ("clock_seconds", "cpu_seconds"))] for row in found]
    return table(rows, ["", "seconds by the clock", "seconds of the processor"])


def embedding_store() -> str:
    """What a store of ten million embeddings takes to open and to read."""
    found = read("embedding_store")
    rows = [
        ["opened", f"{found['open_s']:.3f} s, {found['open_mb']:.1f} MB of memory"],
        [f"{found['rows_read']:,} rows read first, which hashes all files", f"{found['first_read_s']:.1f} s"],
        [f"{found['rows_read']:,} rows read again", f"{found['read_s']:.2f} s, {found['read_mb']:.1f} MB of memory"],
        ["on disk", f"{found['files']} files, the largest of {found['largest_file_mib']:.0f} MiB"],
    ]
    return table(rows, ["", f"{found['sequences']:,} sequences"])


def host_optimizer() -> str:
    """What a step in host memory takes beside one on the device."""
    result, places = read("host_optimizer_cpu"), ("on_device", "on_host")
    rows = []
    for row in result["optimizers"]:
        seconds = ["{median_s:.3f} [{q1_s:.3f}, {q3_s:.3f}]".format(**row[place]) for place in places]
        cpu = " / ".join(f"{row[place]['cpu_median_s']:.3f}" for place in places)
        saved = f"{row['state_bytes_off_the_device'] / result['num_trained']:.1f}"
        rows.append([{"adamw": "AdamW", "muon": "Muon and AdamW"}[row["optimizer"]], *seconds, cpu, saved])
    rows.append(["either, on a GPU", *["not measured"] * 4])
    title = f"a step of {result['num_trained'] / 1e6:.0f} M numbers, one core"
    return table(rows, [title, "in place, s", "on the host, s", "CPU s", "bytes off the card per number"])


def eight_bit() -> str:
    """One row per side and seed: scores beside the noise of a base in 8 bits."""
    rows = []
    for run in read("eight_bit")["runs"]:
        noise = run["noise_share"]
        evidence = [run["plan"][name]["evidence"] for name in ("quantized_base", "encoder_precision")]
        saved = next((one["bytes_saved"] for one in evidence if "bytes_saved" in one), None)
        cells = [f"{run['experiment']}, {run['side']}", f"{run['sizes']['train']:,} / {run['sizes']['test']:,}"]
        cells += [interval(run["scores"][metric]) for metric in ("spearman", "rmse")]
        cells.append("-" if noise is None else f"{max(noise.values()):.1%}: {run['verdict_of_probe']}")
        rows.append([*cells, "-" if saved is None else f"{saved / 2**20:.1f} MiB"])
    headers = ["side", "rows, train / test", "Spearman [95 %]", "RMSE [95 %]", "noise: the probe", "saved"]
    return table(rows, headers)


def optimizer_states() -> str:
    """Loss of AdamW with states in 32 and in 8 bits; mean and standard deviation over seeds."""
    result = read("optimizer_states")
    rows = []
    for side, loss in result["loss"].items():
        runs = [run for run in result["runs"] if run["side"] == side]
        told = "{mean:.3f} +- {sd:.3f}".format(**loss)
        rows.append([side, str(len(runs)), told, f"{runs[0]['bytes_per_number']:.1f}"])
    rows.append(["difference, seed by seed", rows[0][1], "{mean:+.3f} +- {sd:.3f}".format(**result["difference"]), ""])
    return table(rows, ["`--optim`", "seeds", "masked-LM loss after 250 steps", "bytes per number"])


def memory_ledger() -> str:
    """Peak memory of training steps of ESM-2's shapes, predicted and measured."""
    rows = []
    for row in read("memory_ledger_cpu")["rows"]:
        peaks = [f"{row[name]['bytes'] / 2**30:.2f}" for name in ("predicted", "allocations")]
        off = f"{row['predicted_by_allocations'] - 1:+.1%}"
        rows.append([row["case"], "{rows} x {length}".format(**row["settings"]), *peaks, off])
    return table(rows, ["150M unless said", "tokens", "predicted, GiB", "allocated", "off"])


# --- generation -----------------------------------------------------------------------------------------------------

_GENERATORS = {"lstm": "LSTM tiny", "transformer": "Transformer tiny", "esm": "frozen ESM-2 8M, tiny decoder"}


def generator_speed() -> str:
    """Training and sampling of generators beside stock transformers; medians, least and most of the rounds."""
    result = read("generator_speed")
    rows = []
    for part, name in (("training", "lstm"), ("training", "transformer"), ("encoder", "esm")):
        if part not in result:
            rows.append([f"training, {_GENERATORS[name]}", "stock, tokens", *["not measured"] * 5])
            continue
        sides = result[part][name]["sides"]
        for other, side in [*sides.items()][1:]:
            rates = [f"{each['tokens_per_cpu_s']:,.0f}" for each in (sides["hf_ext"], side)]
            loss = f"{side['hf_ext_loss_minus_its'][-1]:+.3f} of {side['passes'][-1]['loss']:.2f}"
            faster = _times_as_fast(side["hf_ext_is"])
            rows.append([f"training, {_GENERATORS[name]}", f"{other}, tokens", *rates, *faster, loss])
    for name in ("lstm", "transformer"):
        measured = result["sampling"][name]
        rates = [f"{measured['antibodies_per_cpu_s'][side]:.1f}" for side in ("hf_ext", "stock")]
        cells = [f"sampling, {_GENERATORS[name]}", "stock `generate`, antibodies", *rates]
        rows.append([*cells, *_times_as_fast(measured["hf_ext_is"]), "-"])
    training = result["training"]
    rates = [f"{training[n]['sides']['hf_ext']['tokens_per_cpu_s']:,.0f}" for n in ("lstm", "transformer")]
    over = _times_as_fast(training["lstm_over_transformer"])
    rows.append(["training, LSTM tiny", "our Transformer tiny, tokens", *rates, *over, "-"])
    headers = ["what", "against, counted", "ours / CPU s", "it / CPU s", "times as fast, CPU", "wall"]
    return table(rows, [*headers, "loss, ours less its"])


def _times_as_fast(ratios: dict[str, Any]) -> list[str]:
    return ["{median:.2f}x [{least:.2f}, {most:.2f}]".format(**ratios[unit]) for unit in ("cpu_s", "wall_s")]


_ABOVE = "affinities.share_above"
_JUDGED = {
    "validity.strict": "valid, strictly",
    "diversity.unique_pairs": "unique",
    "novelty.memorised": "in training",
    "humanness": "OASis",
    "recovery.cdr3": "CDR-H3 recovery",
}


def generator_runs(with_affinities: bool = False) -> str:
    """Generators on real pairs: a row per run, then baselines and the held-out antibodies.

    Args:
        with_affinities: of the runs that were asked for affinities, with what a discriminator says of them.
    """
    condition = "pKd" if with_affinities else "antigen"
    more = {_ABOVE: "predicted above 7", "affinities.correlation": "Spearman, asked and predicted"}
    judged = {**_JUDGED, **(more if with_affinities else {})}
    runs = [run for run in read("generator_runs")["runs"] if bool(run["sets"]["model"].get(_ABOVE)) == with_affinities]
    rows = []
    for run in runs:
        effect = next((one["comparison"] for one in run["effects"] if one["condition"] == condition), None)
        gates = [gate["passed"] for gate in run["gates"] if gate["passed"] is not None]  # None: does not apply
        cells = [run["run"], f"{run['sizes']['train']:,} x {run['train']['epoch']:g}"]
        cells.append(f"{run['train_token_loss']:.2f} / {run['validation_token_loss']:.2f}")
        cells += [*_judged(run["sets"]["model"], judged), _effect(effect)]
        rows.append([*cells, f"{sum(gates)} of {len(gates)}", f"{run['cpu_s'] / 60:.0f} min"])
    for name, found in runs[0]["sets"].items():
        if name != "model":
            rows.append([name, "-", "-", *_judged(found, judged), "-", "-", "-"])
    shuffling = f"shuffling the {condition} costs, nats per token"
    headers = ["", "rows x epochs", "nats per token, train / validation", *judged.values(), shuffling]
    return table(rows, [*headers, "gates passed", "CPU time"])


def _judged(found: dict[str, Any], judged: dict[str, str]) -> list[str]:
    return [f"{found[name]['value']:.3f}" if found.get(name, {}).get("value") is not None else "-" for name in judged]


def _effect(comparison: dict[str, Any] | None) -> str:
    if comparison is None:
        return "not measured"
    shown = f"{comparison['improvement']:.4f}"
    return shown if comparison["low"] is None else shown + " [{low:.4f}, {high:.4f}]".format(**comparison)


# --- operators ------------------------------------------------------------------------------------------------------


def pde_demo() -> str:
    """The demo of the operator recipe: errors beside trivial ones, and what it took."""
    runs = read("pde_demo_cpu")["runs"]
    rows: Rows = []
    for name in runs[0]["scores"]:
        cells = []
        for metric in ("advection1d_nrmse", "darcy2d_nrmse"):
            values = [run["scores"][name][metric]["value"] for run in runs if metric in run["scores"][name]]
            cells.append(mean_and_spread(values, 4) if values else "-")
        rows.append([name, *cells, *([""] * 2)])
    for task, column in (("advection1d", 1), ("darcy2d", 2)):
        least = min(run["factors"][task] for run in runs)
        rows[0][column] += f", {least:.1f} times below at least"
    rows[0][3:] = [mean_and_spread([run[key] for run in runs], 0) for key in ("wall_s", "cpu_s")]
    seeds = f"{len(runs)} seed" + ("s" if len(runs) > 1 else "")
    return table(rows, [seeds, "advection, nRMSE", "Darcy flow, nRMSE", "seconds", "CPU seconds"])


def pde_darcy() -> str:
    """Darcy flow at 64 x 64: our operator and neuraloperator's FNO after equal CPU time, and the published error."""
    result, names = read("pde_darcy_cpu"), {"operator": "OperatorTransformer", "fno": "FNO of neuraloperator"}
    rows = []
    for name, side in result["sides"].items():
        cpu = f"{side['cpu_s'] / 60:.0f} min"
        rows.append([names[name], f"{side['parameters']:,}", cpu, f"{side['test_relative_l2']:.4f}"])
    published = result["published"]
    told = "FNO as published, at {resolution} x {resolution}".format(**published)
    rows.append([told, "-", "500 epochs", f"{published['relative_l2']:.4f}"])
    rows.append(["training mean", "-", "-", f"{next(iter(result['baselines'].values())):.4f}"])
    return table(rows, ["", "parameters", "trained for", "relative L2"])


def pde_terms() -> str:
    """What auxiliary losses cost, predicted and measured, and what leaving some out costs in error."""
    rows = []
    for side in read("pde_terms_cpu")["sides"]:
        measured = (
            "1" if side.get("speedup") is None else "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**side["speedup"])
        )
        errors = [mean_and_spread(side[metric], 4) for metric in ("advection1d_nrmse", "darcy2d_nrmse", "nrmse")]
        rows.append([side["name"], f"{side['predicted_speedup']:.2f}x", measured, *errors])
    return table(rows, ["terms", "predicted", "measured", "advection, nRMSE", "Darcy flow, nRMSE", "mean"])


def upstream_tests() -> str:
    """Why tests of transformers pass with Trainer alone, and which they are."""
    tests: dict[str, list[str]] = {}
    for name, reason in read("upstream_tests")["pass with Trainer alone"].items():
        tests.setdefault(reason, []).append(f"`{name.removeprefix('test_')}`")
    rows = [[str(len(names)), reason, ", ".join(names)] for reason, names in tests.items()]
    return table(rows, ["tests", "the test", "names, without `test_`"])


def upstream_counts() -> str:
    """What became of transformers' own tests on both sides, and of which versions they are."""
    found = read("upstream_tests")
    versions = found["versions"]
    words = ("passed", "failed", "skipped")
    rows = [[side, *(str(found[side].get(word, 0)) for word in words)] for side in ("Trainer", "FastTrainer")]
    tested = f"transformers {versions['transformers']}, tests of {found['tests of transformers']}"
    return table(rows, [tested, *words])


MEASURED: dict[str, Callable[[], str]] = {
    **{
        made.__name__: made
        for made in (embed_once, default_runs, default_classes, secondary_structure, scores, compare, same_numbers)
    },
    **{made.__name__: made for made in (folds_and_seeds, windows, few_labels, whole_command, published)},
    **{made.__name__: made for made in (faults, replay, evaluation, activation_checkpointing, element_wise)},
    **{
        made.__name__: made
        for made in (
            command_times,
            plan_cost,
            plan_products,
            cpu_step,
            cpu_encoding,
            int8_noise,
            scale,
            doctor_times,
            embedding_store,
        )
    },
    **{made.__name__: made for made in (host_optimizer, eight_bit, optimizer_states, memory_ledger, generator_speed)},
    **{made.__name__: made for made in (generator_runs, pde_demo, pde_darcy, pde_terms)},
    "compare_fast_bf16": partial(compare, "compare_mlm_8M_fast_bf16"),
    "generator_affinities": partial(generator_runs, with_affinities=True),
    "progression_affinity": partial(progression, "progression_affinity_cpu"),
    "progression_pde": partial(progression, "progression_pde_cpu"),
    **{made.__name__: made for made in (upstream_tests, upstream_counts)},
    "gpu_speed": partial(speed_table, RESULTS),
    "gpu_parts": partial(parts_table, RESULTS),
}
