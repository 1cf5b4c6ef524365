"""Writes the tables of all pages from benchmarks/results/; `--check` only says whether they are current.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from device_table import DEVICES, device_rows
from encoder_table import choice_rows, family_rows
from gpu.table import parts_table, read_sessions, speed_table
from progression import describe_runs, phases_table, summarize
from speedup_cards import index

from hf_ext.reporting.tables import format_markdown_table
from hf_ext.reporting.units import NOT_MEASURED

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHARE = "5 %"  # of the rows, in both benchmarks of evaluation
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def embed_once() -> str:
    """The first result: one row per side of `benchmarks/embed_once.py`."""
    result = json.loads((RESULTS / "embed_once_omicron.json").read_text())
    slow, fast = result["slow"], result["fast"]
    floor = json.loads((RESULTS / "one_hot_ridge_omicron.json").read_text())["scores"]["spearman"]
    epochs = int(result["num_epochs"])
    rows = [
        [
            "every row through the encoders, one sequence at a time",
            f"{slow['epoch_seconds'] / 3600:.1f} h (scaled from {slow['num_rows']:,} rows)",
            f"{slow['whole_run_days']:.1f} days",
            "not measured",
        ],
        [
            f"embedded once, then batches of {slow['batch_size']}",
            f"{fast['epoch_at_loop_batch_seconds']:.0f} s ({result['epoch_speedup_at_loop_batch']:.0f}x)",
            "-",
            "-",
        ],
        [
            f"embedded once, then batches of {fast['batch_size']} (`max_speed`)",
            "-",
            f"{fast['whole_run_seconds'] / 60:.1f} min ({result['whole_run_speedup']:.0f}x)",
            _interval(fast["test"]["scores"]["model"]["spearman"]),
        ],
        ["for comparison, no encoder: one-hot ridge per antibody", "-", "-", _interval(floor)],
    ]
    return format_markdown_table(rows, ["", "one epoch", f"{epochs} epochs, all included", "test Spearman [95 %]"])


def _interval(score: dict[str, Any]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def compare(name: str = "compare_mlm_8M_cpu.json", on_gpus: bool = True) -> str:
    """One row per side of the comparison on two CPU cores, the optimized side last; and what is not known of GPUs."""
    result = json.loads((RESULTS / name).read_text())
    rows = []
    for name, side in result["sides"].items():
        if side["role"] not in ("baseline", "optimized"):
            continue
        pair = result["against"].get(name)
        ratio = "{value:.2f}x [{low:.2f}, {high:.2f}]".format(**pair["ratio"]) if pair else "-"
        loss = f"{pair['loss']['final']:+.4f}" if pair else "-"
        step = f"{1000 * side['step_seconds']['median']:,.0f}"
        rows.append([name, f"{side['rate']['value']:,.0f}", step, f"{side['peak_memory_gib']:.2f}", ratio, loss])
    known = "see above" if read_sessions(RESULTS) else NOT_MEASURED
    for kind in ("full", "LoRA", "frozen, encoding only") if on_gpus else ():
        rows.append([f"one GPU, ESM-2 650M, {kind}", *[known] * 5])
    headers = [
        "side",
        "real residues / s",
        "median step, ms",
        "peak memory, GiB",
        f"{result['optimized']} is",
        "its final loss",
    ]
    return format_markdown_table(rows, headers)


def default_runs() -> str:
    """Runs without settings beside their best baselines and `--head mlp`: one row per set, from `default_runs.json`."""
    runs = json.loads((RESULTS / "default_runs.json").read_text())["runs"]
    sets: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        sets.setdefault(run["data"], []).append(run)
    rows = []
    for name, several in sets.items():
        own = [run for run in several if run["asked"] == "auto"]
        large = next((run for run in several if run["asked"] == "mlp"), None)
        cells = [name, len(own), f"{own[0]['sizes']['train']:,} / {own[0]['sizes']['test']:,}"]
        for metric, best in (("spearman", max), ("rmse", min)):
            values = [run["scores"]["model"][metric]["value"] for run in own]
            cells.append(f"{mean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else ""))
            cells.append(_best_baseline(own[0]["scores"], metric, best))
            cells.append(f"{large['scores']['model'][metric]['value']:.3f}" if large else "-")
        cells.append(_count_verdicts(own))
        cpu = mean(run["cpu_s"] for run in own)
        cells.append(f"{cpu:.0f} s" + (f" / {large['cpu_s']:.0f} s" if large else ""))
        rows.append(cells)
    headers = ["data", "seeds", "rows, train / test", "Spearman", "best baseline", "`--head mlp`"]
    headers += ["RMSE", "best baseline", "`--head mlp`", "verdicts", "CPU time / of `--head mlp`"]
    return format_markdown_table(rows, headers)


def _count_verdicts(runs: list[dict[str, Any]]) -> str:
    """Verdicts of the runs, most frequent first: "worse" is said where the interval of the difference says it."""
    outcomes = Counter(
        "worse" if (run["verdict"]["comparison"] or {}).get("is_worse") else run["verdict"]["outcome"] for run in runs
    )
    return ", ".join(f"{outcome} {number}" for outcome, number in outcomes.most_common())


def _best_baseline(scores: dict[str, Any], metric: str, best: Callable[..., Any]) -> str:
    others = {name: both[metric]["value"] for name, both in scores.items() if name != "model"}
    found = best((name for name, value in others.items() if value is not None), key=others.__getitem__)
    return f"{others[found]:.3f} ({found})"


def scores() -> str:
    """Test scores of every data set under `benchmarks/results/<name>_seed<k>.json`, mean and spread over seeds."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*_seed*.json")):
        sets.setdefault(path.stem.rpartition("_seed")[0], []).append(json.loads(path.read_text()))
    rows = []
    for name, runs in sets.items():
        cells = [_over_seeds(runs, predictor, metric) for predictor, metric in _COLUMNS]
        rows.append([name, str(len(runs)), f"{runs[0]['test']['num_rows']:,}", *cells])
    headers = ["data", "seeds", "test rows", *(f"{metric}, {predictor}" for predictor, metric in _COLUMNS)]
    return format_markdown_table(rows, headers)


_COLUMNS = [
    ("model", "spearman"),
    ("ridge on embeddings", "spearman"),
    ("model", "rmse"),
    ("ridge on embeddings", "rmse"),
    ("training mean", "rmse"),
]


def _is_frozen(run: dict[str, Any]) -> bool:
    return any(d["name"] == "embedding_cache" and d["status"] == "applied" for d in run["decisions"])


def _over_seeds(runs: list[dict[str, Any]], predictor: str, metric: str) -> str:
    if predictor == "ridge on embeddings" and not _is_frozen(runs[0]):
        return "-"  # embeddings of an encoder that trained are no baseline
    values = [run["test"]["scores"][predictor][metric]["value"] for run in runs]
    if len(values) < 2 or predictor != "model":
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} +- {stdev(values):.3f}"


def faults() -> str:
    """What was done to runs, and what became of them; one row per suite of `tests/faults` and the like."""
    folder = RESULTS / "faults"
    suites = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    stall = json.loads((RESULTS / "checkpoint_stall.json").read_text())
    ours = [row for row in suites["kill_training"]["rows"] if not row["family"].startswith("stock")]
    kills, resumed, identical = (sum(row[key] for row in ours) for key in ("kills", "resumed", "identical"))
    damage, stock_damage = suites["damaged_checkpoints"], suites["damaged_checkpoints_of_stock_Trainer"]
    full, budget = suites["disk_full"], suites["disk_budget"]
    errors = full["tmpfs sizes"] + full["file size limits"] + full["injected errors"] + full["others"]
    stops, equal = suites["stops_by_signal_and_time"], suites["resume_equality"]
    bad, stale, hostile = (suites[n] for n in ("numbers_that_are_not_finite", "stale_folders", "hostile_files"))
    pairs, tables, parquet = (suites[n] for n in ("two_runs_in_one_folder", "mutated_tables", "damaged_Parquet_files"))
    rows = [
        [
            "kill -9 in a save, a rotation, a re-save; at every file operation",
            f"{kills} kills of {len({row['family'] for row in ours})} kinds of run",
            f"{resumed} continued, {identical} ended bit-identical; at most one save interval and a step lost",
        ],
        _worker_kills(suites["kill_with_workers"]["rows"]),
        *(_stock_kills(row) for row in suites["kill_training"]["rows"] if row["family"].startswith("stock")),
        [
            "a file of a checkpoint missing, cut, flipped, swapped",
            f"{damage['cases']} cases",
            f"{damage['found_and_passed_over']} found before a tensor was loaded, the one before taken",
        ],
        [
            "the same, stock Trainer",
            f"{stock_damage['cases']} cases",
            f"{stock_damage['failed']} failed, {stock_damage['silently_wrong']} silently wrong",
        ],
        [
            "disk full, quota, read-only, I/O errors",
            f"{errors} cases",
            f"{full['crashes']} crashes; {full['resumed']} resumed, {full['identical']} identical",
        ],
        [
            "`--save_total_size_gb`, sampled every ms",
            f"{budget['saves']:,} saves, {budget['samples']:,} samples",
            f"{budget['above the budget']} above the budget",
        ],
        ["SIGTERM, SIGINT, time limits", f"{stops['cases']} cases", f"{stops['identical']} continued bit-identical"],
        [
            "killed between saves: map, streams, packed, cached, ...",
            f"{equal['cases']} cases",
            f"{equal['identical']} bit-identical: weights, losses, rows",
        ],
        ["NaN and infinity", f"{bad['cases']} cases", f"{bad['right']} stopped or left out, none saved"],
        ["foreign, stale, linked folders", f"{stale['cases']} cases", f"{stale['right']} right, none touched"],
        [
            "two runs given one folder, 0 to 3 s apart",
            f"{pairs['pairs']} pairs",
            f"{pairs['one_refused']} times one refused, {pairs['other_unharmed']} times the other unharmed",
        ],
        [
            "mutated CSV and TSV files, against a second reader",
            f"{tables['files']:,} files",
            f"{tables['refused']} refused, the others read line by line; "
            f"{tables['silent_differences']} silent differences",
        ],
        [
            "damaged Parquet files",
            f"{parquet['files']} files",
            f"{parquet['named']} named, {parquet['read right']} read right; "
            f"{parquet['changed values that only checksums show']} held other values, which only page checksums show",
        ],
        [
            "hostile files",
            f"{hostile['probes']} probes",
            f"{hostile['executed']} executed, {hostile['escaped']} left the folder; no pickle or token written",
        ],
        [
            f"a save of {stall['megabytes']['fast']:.0f} MB",
            f"{stall['num_saves']} saves a side",
            f"training stands still {stall['ratio']:.2f}x as long as with stock Trainer; "
            f"the next step takes {stall['next_step_slower_ms']['fast']:.0f} ms longer",
        ],
    ]
    return format_markdown_table(rows, ["what", "how often", "what became of it"])


def _worker_kills(rows: list[dict[str, Any]]) -> list[str]:
    kills, resumed, identical = (sum(row[key] for row in rows) for key in ("kills", "resumed", "identical"))
    return [
        "kill -9 of runs with data workers, at any moment",
        f"{kills} kills of {len({row['family'] for row in rows})} kinds of run",
        f"{resumed} continued, {identical} ended bit-identical",
    ]


def _stock_kills(row: dict[str, Any]) -> list[str]:
    wrong = row["resumed"] - row["identical"]
    return [
        f"{row['family']}, {row['kind']}",
        f"{row['kills']} kills",
        f"{row['kills'] - row['resumed']} could not continue, {wrong} continued silently wrong",
    ]


def evaluation() -> str:
    """Subsets against all rows, and what stops a run."""
    names = ("subset_vs_full", "false_stops")
    subset, stops = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    held, ratio, rule = subset["coverage"], subset["time"]["ratio"], stops["paired_rule"]
    num_curves = f"{stops['settings']['num_curves']} simulated curves that still rise, {SHARE} of the rows"
    ends = "; ".join(
        f"{kind} {counts['num_stopped']} of {counts['num_stopped'] + counts['num_not_stopped']}"
        for kind, counts in rule["after_training_ended"].items()
    )
    rows = [
        [
            f"{SHARE} of the rows: the 95 % interval holds the Spearman of all rows",
            f"{held['num_evaluations']} evaluations, {held['num_seeds']} seeds",
            f"{held['num_held']} ({held['share_held']:.1%}); at the end of training in "
            f"{held['num_seeds_held_at_the_end']} of {held['num_seeds']} seeds",
        ],
        [
            "time of such an evaluation",
            f"{subset['time']['num_pairs']} interleaved pairs",
            f"{ratio['median']:.1%} of that of all rows [{ratio['least']:.1%}, {ratio['most']:.1%}]",
        ],
        ["stops too early: patience on the best score", num_curves, f"{stops['patience']['share_false_stops']:.1%}"],
        ["stops too early: `--early_stopping_patience`", num_curves, f"{rule['share_false_stops']:.1%}"],
        ["stops once training has ended", "scores that settle, overfit, or stay while predictions move", ends],
    ]
    return format_markdown_table(rows, ["what", "how often", "result"])


def scaling() -> str:
    """Two processes as measured."""
    rows = [_measured_scaling(f"scaling_two_processes_cpu{which}") for which in ("", "_small_batch")]
    rows.append(["not measured", "any number of GPUs", "-", "-"])
    return format_markdown_table(rows, ["known by", "what", "efficiency", "step time: measured / model"])


def _measured_scaling(name: str) -> list[str]:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    shape, settings = result["shape"]["num_trainable"], result["settings"]
    what = (
        f"1 -> 2 processes on two CPU cores, DDP over gloo, {shape / 1e6:.1f} M weights, "
        f"{settings['rows']} x {settings['length']} tokens each"
    )
    ratio = result["measured_over_predicted_no_overlap"]
    alone, twin = result["efficiency_measured"], result["efficiency_without_sharing_the_cpu"]
    seen = f"{alone:.0%}; {twin:.0%} of two that share the CPU and send nothing"
    return ["measured", what, seen, f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"]


def same_numbers() -> str:
    """Several processes against one: the largest difference over the cases of each way to share the work."""
    result = json.loads((RESULTS / "same_numbers.json").read_text())
    rows = []
    for name in dict.fromkeys(row["processes"] for row in result["rows"]):
        cases = [row for row in result["rows"] if row["processes"] == name]
        worst = [max(row[key] for row in cases) for key in ("loss", "weights")]
        seen = [f"{value:.0e}" if value else "0" for value in worst]
        rows.append([name, ", ".join(row["case"] for row in cases), *seen])
    return format_markdown_table(rows, ["against one process", "cases", "largest difference of a loss", "of a weight"])


def activation_checkpointing() -> str:
    """Bytes and CPU time of each policy, over those of none; medians and quartiles."""
    result = json.loads((RESULTS / "activation_checkpointing_cpu.json").read_text())
    rows = []
    for row in result["rows"]:
        if row["policy"] == "none":
            cells = [f"{row['kept_mb']:,.0f} MB", f"{row['most_mb']:,.0f} MB", f"{row['cpu_ms'][1]:,.0f} ms"]
        else:
            shares = [f"{row[name]:.2f}" for name in ("kept_over_none", "most_over_none")]
            cells = [*shares, "{1:.2f} [{0:.2f}, {2:.2f}]".format(*row["cpu_over_none"])]
        shape = f"{row['model']}, {row['layout']}, {row['tokens']:,} tokens"
        rows.append([shape, row["policy"], *cells, str(row["rounds"])])
    headers = ["ESM-2's shape, bf16", "policy", "kept for backward", "most at a time", "CPU time of a pass", "rounds"]
    return format_markdown_table(rows, headers)


def attention_backward() -> str:
    """Time of attention's ways through its backward pass, over that of the first; medians and quartiles."""
    result = json.loads((RESULTS / "attention_backward_cpu.json").read_text())
    rows = []
    for row in result["rows"]:
        seen = ["{1:.2f} [{0:.2f}, {2:.2f}]".format(*row[f"{side}_over_slices"]) for side in ("split", "kept")]
        rows.append([row["what"], row["sequences"], f"{row['slices_ms'][1]:,.0f} ms", *seen, str(row["rounds"])])
    headers = ["ESM-2 8M's shape, bf16", "tokens", "a slice per length", "cut once", "and weights kept", "rounds"]
    return format_markdown_table(rows, headers)


def cpu_step(name: str = "cpu_step_avx512.json") -> str:
    """CPU time of steps and of encoding over that of their matrix products, and over what was taken before."""
    result = json.loads((RESULTS / name).read_text())
    rows, ratios = [], ("over_its_products", "times_as_fast_as_before")
    for row in result["rows"]:
        for side, found in row.items():
            if not isinstance(found, dict):
                continue
            seen = ["{1:.2f} [{0:.2f}, {2:.2f}]".format(*found[name]) for name in ratios]
            rows.append(
                [row["what"], row["sequences"], side, f"{found['seconds'][1]:.1f} s", *seen, str(row["rounds"])]
            )
    headers = [
        "ESM-2 8M's shape",
        "tokens",
        "side",
        "CPU time",
        "over its products",
        "times as fast as before",
        "rounds",
    ]
    return format_markdown_table(rows, headers)


def element_wise() -> str:
    """What a layer moves beside products and attention, counted."""
    rows = json.loads((RESULTS / "element_wise.json").read_text())["rows"]
    stock = rows[0]["bytes_per_token"]
    cells = [
        [
            row["side"],
            f"{row['bytes_per_token'] / 1000:,.0f} kB",
            f"{row['bytes_per_token'] / stock:.0%}",
            str(row["kernels"]),
        ]
        for row in rows
    ]
    return format_markdown_table(cells, ["a layer of ESM-2 650M, bf16", "per token", "share", "kernels"])


def families() -> str:
    """Families of encoders that recipes take; `encoder_table.py` makes them."""
    return format_markdown_table(family_rows(), ["type", "models", "packing", "layers that LoRA adapts"])


def encoder_choices() -> str:
    """The encoder for each of a few devices, computed as the doctor does."""
    return format_markdown_table(choice_rows(), ["", "frozen", "LoRA", "all weights"])


def devices() -> str:
    """What is decided on each device; `device_table.py` names the test that holds each line."""
    return format_markdown_table([row[:-1] for row in device_rows()], ["", *DEVICES])


def command_times() -> str:
    """What commands take, by the clock and of the processor; medians and quartiles."""
    result = json.loads((RESULTS / "command_times_cpu.json").read_text())
    by_what: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        told = ["{1:.1f} [{0:.1f}, {2:.1f}]".format(*row[unit]) for unit in ("clock_seconds", "cpu_seconds")]
        by_what.setdefault(row["what"], {})[row["side"]] = " / ".join(told)
    rows = [[what, sides.get("before", "-"), sides["now"]] for what, sides in by_what.items()]
    return format_markdown_table(rows, ["seconds by the clock / of the processor", "before", "now"])


def embedding_store() -> str:
    """What a store of ten million embeddings takes to open and to read."""
    found = json.loads((RESULTS / "embedding_store.json").read_text())
    rows = [
        ["opened", f"{found['open_s']:.3f} s, {found['open_mb']:.1f} MB of memory"],
        [f"{found['rows_read']:,} rows read first, which hashes all files", f"{found['first_read_s']:.1f} s"],
        [f"{found['rows_read']:,} rows read again", f"{found['read_s']:.2f} s, {found['read_mb']:.1f} MB of memory"],
        ["on disk", f"{found['files']} files, the largest of {found['largest_file_mib']:.0f} MiB"],
    ]
    return format_markdown_table(rows, ["", f"{found['sequences']:,} sequences"])


def host_optimizer() -> str:
    """What a step in host memory takes beside one on the device; medians and quartiles."""
    result = json.loads((RESULTS / "host_optimizer_cpu.json").read_text())
    rows = []
    for row in result["optimizers"]:
        times = ["{median_s:.3f} [{q1_s:.3f}, {q3_s:.3f}]".format(**row[place]) for place in ("on_device", "on_host")]
        cpu = [f"{row[place]['cpu_median_s']:.3f}" for place in ("on_device", "on_host")]
        saved = f"{row['state_bytes_off_the_device'] / result['num_trained']:.1f}"
        rows.append([{"adamw": "AdamW", "muon": "Muon and AdamW"}[row["optimizer"]], *times, " / ".join(cpu), saved])
    rows.append(["either, on a GPU", *["not measured"] * 4])
    title = f"a step of {result['num_trained'] / 1e6:.0f} M numbers, one core"
    return format_markdown_table(
        rows, [title, "in place, s", "on the host, s", "CPU s", "bytes off the card per number"]
    )


def eight_bit() -> str:
    """One row per side and seed of `benchmarks/eight_bit.py`."""
    runs = json.loads((RESULTS / "eight_bit.json").read_text())["runs"]
    rows = []
    for run in runs:
        noise, saved = run["noise_share"], _bytes_saved(run)
        rows.append(
            [
                f"{run['experiment']}, {run['side']}",
                f"{run['sizes']['train']:,} / {run['sizes']['test']:,}",
                _interval(run["scores"]["spearman"]),
                _interval(run["scores"]["rmse"]),
                "-" if noise is None else f"{max(noise.values()):.1%}: {run['verdict_of_probe']}",
                "-" if saved is None else f"{saved / 2**20:.1f} MiB",
            ]
        )
    headers = ["side", "rows, train / test", "Spearman [95 %]", "RMSE [95 %]", "noise: the probe", "saved"]
    return format_markdown_table(rows, headers)


def _bytes_saved(run: dict[str, Any]) -> int | None:
    """By the plan, of weights."""
    decisions = [run["plan"][name]["evidence"] for name in ("quantized_base", "encoder_precision")]
    return next((evidence["bytes_saved"] for evidence in decisions if "bytes_saved" in evidence), None)


def hard_memory_limit() -> str:
    """Runs under a hard limit of memory; of each, how it ended."""
    result = json.loads((RESULTS / "hard_memory_limit.json").read_text())
    words = {
        "without_limit": "no limit",
        "stop": f"{result['share']:.0%} of that, `--oom_policy stop`",
        "step_down": f"{result['share']:.0%} of that, `--oom_policy step_down`",
        "begun_on_its_rung": "no limit, begun with the batch on which that ended",
    }
    rows = []
    for name, text in words.items():
        run = result[name]
        if "error" in run:
            rows.append([text, "-", "ended: out of memory", "-", "-"])
            continue
        rungs = "; ".join(f"from step {rung['step']}: {rung['rung']}" for rung in run["rungs"]) or "as asked for"
        weights = run["weights_sha256"][:8]
        rows.append([text, f"{run['added_bytes'] / 2**20:,.0f} MiB", rungs, f"{run['cpu_seconds']:.0f} s", weights])
    return format_markdown_table(rows, ["ESM-2 8M's shape, 16 rows", "taken", "batch", "CPU time", "weights, SHA-256"])


def optimizer_states() -> str:
    """Loss of AdamW with states in 32 and in 8 bits; mean and standard deviation over seeds."""
    result = json.loads((RESULTS / "optimizer_states.json").read_text())
    rows = []
    for side, loss in result["loss"].items():
        runs = [run for run in result["runs"] if run["side"] == side]
        num_bytes = f"{runs[0]['bytes_per_number']:.1f}"
        rows.append([side, str(len(runs)), f"{loss['mean']:.3f} +- {loss['sd']:.3f}", num_bytes])
    difference = result["difference"]
    rows.append(["difference, seed by seed", rows[0][1], f"{difference['mean']:+.3f} +- {difference['sd']:.3f}", ""])
    return format_markdown_table(rows, ["`--optim`", "seeds", "masked-LM loss after 250 steps", "bytes per number"])


def generator_speed() -> str:
    """Training and sampling of generators beside stock transformers; medians, least and most of the rounds."""
    result = json.loads((RESULTS / "generator_speed.json").read_text())
    rows = []
    for part, name in (("training", "lstm"), ("training", "transformer"), ("encoder", "esm")):
        if part not in result:
            rows.append([f"training, {_GENERATORS[name]}", "stock, tokens", *["not measured"] * 5])
            continue
        sides = result[part][name]["sides"]
        for other, side in [*sides.items()][1:]:
            rates = [f"{each['tokens_per_cpu_s']:,.0f}" for each in (sides["hf_ext"], side)]
            loss = f"{side['hf_ext_loss_minus_its'][-1]:+.3f} of {side['passes'][-1]['loss']:.2f}"
            cells = [f"training, {_GENERATORS[name]}", f"{other}, tokens", *rates]
            rows.append([*cells, *_times(side["hf_ext_is"]), loss])
    for name in ("lstm", "transformer"):
        measured = result["sampling"][name]
        rates = [f"{measured['antibodies_per_cpu_s'][side]:.1f}" for side in ("hf_ext", "stock")]
        cells = [f"sampling, {_GENERATORS[name]}", "stock `generate`, antibodies", *rates]
        rows.append([*cells, *_times(measured["hf_ext_is"]), "-"])
    rates = [
        f"{result['training'][name]['sides']['hf_ext']['tokens_per_cpu_s']:,.0f}" for name in ("lstm", "transformer")
    ]
    over = _times(result["training"]["lstm_over_transformer"])
    rows.append(["training, LSTM tiny", "our Transformer tiny, tokens", *rates, *over, "-"])
    headers = [
        "what",
        "against, counted",
        "ours / CPU s",
        "it / CPU s",
        "times as fast, CPU",
        "wall",
        "loss, ours less its",
    ]
    return format_markdown_table(rows, headers)


_GENERATORS = {"lstm": "LSTM tiny", "transformer": "Transformer tiny", "esm": "frozen ESM-2 8M, tiny decoder"}


def generator_runs() -> str:
    """Generators on real pairs without affinities: a row per run, then baselines and the held-out antibodies."""
    return _generator_table(_JUDGED, "antigen", lambda run: not run["sets"]["model"].get(_ABOVE))


def generator_affinities() -> str:
    """The same of runs that were asked for affinities, with what a discriminator says of what they wrote."""
    judged = {**_JUDGED, _ABOVE: "predicted above 7", "affinities.correlation": "Spearman, asked and predicted"}
    return _generator_table(judged, "pKd", lambda run: bool(run["sets"]["model"].get(_ABOVE)))


_ABOVE = "affinities.share_above"
_JUDGED = {
    "validity.strict": "valid, strictly",
    "diversity.unique_pairs": "unique",
    "novelty.memorised": "in training",
    "humanness": "OASis",
    "recovery.cdr3": "CDR-H3 recovery",
}


def _generator_table(judged: dict[str, str], condition: str, belongs: Callable[[dict[str, Any]], bool]) -> str:
    runs = [run for run in json.loads((RESULTS / "generator_runs.json").read_text())["runs"] if belongs(run)]
    rows = []
    for run in runs:
        effect = next((one["comparison"] for one in run["effects"] if one["condition"] == condition), None)
        length = f"{run['sizes']['train']:,} x {run['train']['epoch']:g}"
        losses = f"{run['train_token_loss']:.2f} / {run['validation_token_loss']:.2f}"
        gates = [gate["passed"] for gate in run["gates"] if gate["passed"] is not None]  # None: does not apply
        passed = f"{sum(gates)} of {len(gates)}"
        cost = f"{run['cpu_s'] / 60:.0f} min"
        cells = [run["run"], length, losses, *_judged(run["sets"]["model"], judged), _effect(effect)]
        rows.append([*cells, passed, cost])
    for name, scores in runs[0]["sets"].items():
        if name != "model":
            rows.append([name, "-", "-", *_judged(scores, judged), "-", "-", "-"])
    shuffling = f"shuffling the {condition} costs, nats per token"
    headers = ["", "rows x epochs", "nats per token, train / validation", *judged.values(), shuffling]
    return format_markdown_table(rows, [*headers, "gates passed", "CPU time"])


def _judged(scores: dict[str, Any], judged: dict[str, str]) -> list[str]:
    return [f"{scores[name]['value']:.3f}" if scores.get(name, {}).get("value") is not None else "-" for name in judged]


def _effect(comparison: dict[str, Any] | None) -> str:
    if comparison is None:
        return "not measured"
    shown = f"{comparison['improvement']:.4f}"
    return shown if comparison["low"] is None else shown + " [{low:.4f}, {high:.4f}]".format(**comparison)


def _times(ratios: dict[str, Any]) -> list[str]:
    return ["{median:.2f}x [{least:.2f}, {most:.2f}]".format(**ratios[unit]) for unit in ("cpu_s", "wall_s")]


def memory_ledger() -> str:
    """Peak memory and step time of ESM-2's shapes: predicted, and measured in two ways."""
    result = json.loads((RESULTS / "memory_ledger_cpu.json").read_text())
    rows = []
    for row in result["rows"]:
        settings = row["settings"]
        peaks = [f"{row[name]['bytes'] / 2**30:.2f}" for name in ("predicted", "allocations", "resident")]
        off = [f"{row[f'predicted_by_{name}'] - 1:+.1%}" for name in ("allocations", "resident")]
        tokens = f"{settings['rows']} x {settings['length']}"
        rows.append([row["case"], tokens, *peaks, *off, f"{row['resident']['seconds']:.0f} s"])
    headers = [
        "150M unless said",
        "tokens",
        "predicted, GiB",
        "allocated",
        "resident",
        "off",
        "off",
        "a step, beside other work",
    ]
    return format_markdown_table(rows, headers)


def pde_demo() -> str:
    """The demo of the operator recipe: errors beside trivial ones, and what it took."""
    result = _read_if_there("pde_demo_cpu")
    if result is None:
        return _NOT_MEASURED
    runs = result["runs"]
    rows: list[list[str]] = []
    for name in runs[0]["scores"]:
        cells = []
        for metric in ("advection1d_nrmse", "darcy2d_nrmse"):
            values = [run["scores"][name][metric]["value"] for run in runs if metric in run["scores"][name]]
            cells.append(_mean_and_spread(values, 4) if values else "-")
        rows.append([name, *cells, *([""] * 2)])
    for task, column in (("advection1d", 1), ("darcy2d", 2)):
        least = min(run["factors"][task] for run in runs)
        rows[0][column] += f", {least:.1f} times below at least"
    rows[0][3:] = [_mean_and_spread([run[key] for run in runs], 0) for key in ("wall_s", "cpu_s")]
    seeds = f"{len(runs)} seed" + ("s" if len(runs) > 1 else "")
    return format_markdown_table(rows, [seeds, "advection, nRMSE", "Darcy flow, nRMSE", "seconds", "CPU seconds"])


def pde_darcy() -> str:
    """Darcy flow at 64 x 64: our operator and neuraloperator's FNO after equal CPU time, and the published error."""
    result = _read_if_there("pde_darcy_cpu")
    if result is None:
        return _NOT_MEASURED
    names = {"operator": "OperatorTransformer", "fno": "FNO of neuraloperator"}
    rows = []
    for name, side in result["sides"].items():
        cpu = f"{side['cpu_s'] / 60:.0f} min"
        rows.append([names[name], f"{side['parameters']:,}", cpu, f"{side['test_relative_l2']:.4f}"])
    published = result["published"]
    rows.append([f"FNO as published, at {published['resolution']} x {published['resolution']}", "-", "500 epochs", ""])
    rows[-1][-1] = f"{published['relative_l2']:.4f}"
    rows.append(["training mean", "-", "-", f"{next(iter(result['baselines'].values())):.4f}"])
    return format_markdown_table(rows, ["", "parameters", "trained for", "relative L2"])


def pde_terms() -> str:
    """What auxiliary losses cost, predicted and measured, and what leaving some out costs in error."""
    result = _read_if_there("pde_terms_cpu")
    if result is None:
        return _NOT_MEASURED
    rows = []
    for side in result["sides"]:
        speedup = side.get("speedup")
        measured = "1" if speedup is None else "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**speedup)
        errors = [_mean_and_spread(side[metric], 4) for metric in ("advection1d_nrmse", "darcy2d_nrmse", "nrmse")]
        rows.append([side["name"], f"{side['predicted_speedup']:.2f}x", measured, *errors])
    headers = ["terms", "predicted", "measured", "advection, nRMSE", "Darcy flow, nRMSE", "mean"]
    return format_markdown_table(rows, headers)


def _mean_and_spread(values: list[float], digits: int) -> str:
    spread = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _read_if_there(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


_NOT_MEASURED = "Not measured yet."


def progression_affinity() -> str:
    """The ten optimizations of an affinity run, one on top of the other."""
    return _progression("progression_affinity_cpu")


def progression_pde() -> str:
    """The eight phases of the PDE operator, one on top of the other."""
    return _progression("progression_pde_cpu")


def _progression(name: str) -> str:
    """The table and sentences of `progression.py`."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    return "\n".join(
        [phases_table(result), "", describe_runs(result), "", *(f"- {line}" for line in summarize(result))]
    )


def gpu_speed() -> str:
    """Sides of each card's session, or what will be measured on the first."""
    return speed_table(RESULTS)


def gpu_parts() -> str:
    """What the other parts of each card's session found."""
    return parts_table(RESULTS)


TABLES: dict[str, Callable[[], str]] = {
    "activation_checkpointing": activation_checkpointing,
    "attention_backward": attention_backward,
    "element_wise": element_wise,
    "command_times": command_times,
    "devices": devices,
    "families": families,
    "encoder_choices": encoder_choices,
    "cpu_step": cpu_step,
    "cpu_step_fast_bf16": partial(cpu_step, "cpu_step_fast_bf16.json"),
    "compare": compare,
    "compare_fast_bf16": partial(compare, "compare_mlm_8M_fast_bf16.json", on_gpus=False),
    "embed_once": embed_once,
    "embedding_store": embedding_store,
    "evaluation": evaluation,
    "faults": faults,
    "generator_affinities": generator_affinities,
    "generator_runs": generator_runs,
    "generator_speed": generator_speed,
    "gpu_parts": gpu_parts,
    "gpu_speed": gpu_speed,
    "hard_memory_limit": hard_memory_limit,
    "host_optimizer": host_optimizer,
    "memory_ledger": memory_ledger,
    "optimizer_states": optimizer_states,
    "pde_darcy": pde_darcy,
    "pde_demo": pde_demo,
    "pde_terms": pde_terms,
    "progression_affinity": progression_affinity,
    "progression_pde": progression_pde,
    "same_numbers": same_numbers,
    "scaling": scaling,
    "eight_bit": eight_bit,
    "default_runs": default_runs,
    "scores": scores,
    "speedup_index": index,
}


PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def render(text: str) -> str:
    """`text` with every table block filled from its JSON."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> None:
    """Rewrites `PAGES`, or exits with 1 if `--check` finds one out of date."""
    for path in PAGES:
        text = path.read_text()
        if "--check" not in sys.argv:
            path.write_text(render(text))
        elif render(text) != text:
            sys.exit(f"{path} is not what benchmarks/tables.py writes: run it.")


if __name__ == "__main__":
    main()
