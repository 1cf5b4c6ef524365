"""A masked-LM step and an encoding pass of ESM-2 8M on one CPU core: seconds, and how many times its own products.

    python benchmarks/cpu_step.py [--rounds 5] [--threads 1]

Sides: under bfloat16 autocast all speed-ups that such a step has, and all but one (`hf-ext compare` has stock Trainer
beside them). Each side of each round is a fresh process, and they take turns. Products of matrices are timed by torch's
profiler in one more step; what they would take at the speed of a product of 2,048 x 2,048 is the step's roofline.
Random weights and sequences. Writes `results/cpu_step.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import PAD, interleave, make_esm2, quartiles, run_timed
from torch.profiler import ProfilerActivity, profile

from hf_ext.models import flop_counter, pack_encoders
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu, fuse_qkv, label_only
from hf_ext.speedups.precision import keep_freed_memory

RESULT = Path(__file__).resolve().parent / "results" / "cpu_step.json"
BATCHES = {"16 x 107-630": (16, 107, 630), "64 x 40-200": (64, 40, 200)}
SIDES = ("all", "without fused_qkv", "without cpu_memory")
STEPS = 3  # whose median counts
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


def make_batch(number: int, shortest: int, longest: int) -> dict[str, torch.Tensor]:
    """Random proteins, the same in every process, 15 % of their residues with a label."""
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) for _ in range(number)]
    ids = torch.full((number, max(lengths) + 2), PAD)
    for row, length in zip(ids, lengths):
        row[: length + 2] = torch.tensor([0, *draw.choices(range(4, 24), k=length), 2])
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    labels = torch.where(chosen & (ids != PAD), ids, -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def make_model(side: str) -> Any:
    """ESM-2 8M with what a run of that side does to it on a CPU."""
    if side != "without cpu_memory":
        keep_freed_memory()
    model = make_esm2("8M")
    set_attention(model, "blocked")
    fuse_gelu(model)
    if side != "without fused_qkv":
        fuse_qkv(model)
    pack_encoders(model)
    label_only(model)
    return model


def measure(side: str, name: str, threads: int) -> dict[str, float]:
    """Of one side, in this process."""
    torch.set_num_threads(threads)
    batch, model = make_batch(*BATCHES[name]), make_model(side)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def encode() -> None:
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model.esm(batch["input_ids"], batch["attention_mask"])

    found: dict[str, float] = {}
    for what, work in (("step", step), ("encoding", encode)):
        used, clock = [], []
        for turn in range(2 + STEPS):
            if turn == 2:
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            began, cpu = time.perf_counter(), time.process_time()
            work()
            used.append(time.process_time() - cpu)
            clock.append(time.perf_counter() - began)
        found[f"{what}_faults"] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / STEPS
        found[f"{what}_cpu_s"], found[f"{what}_s"] = statistics.median(used[2:]), statistics.median(clock[2:])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            work()
        events = [event for event in profiled.key_averages() if event.key in PRODUCTS]
        found[f"{what}_products_s"] = sum(event.self_cpu_time_total for event in events) / 1e6
        with flop_counter() as counter:
            work()
        found[f"{what}_gflop"] = counter.get_total_flops() / 1e9
    square = torch.randn(2048, 2048, dtype=torch.bfloat16)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - began)
    found["peak_gflop_per_s"] = 2 * 2048**3 / min(times) / 1e9
    return found


def measure_apart(side: str, name: str, threads: int) -> dict[str, float]:
    """In a fresh process."""
    command = [sys.executable, __file__, "--side", side, "--batch", name, "--threads", str(threads)]
    run, *_ = run_timed(command)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Runs all sides of both batches, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--batch", choices=[*BATCHES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.side, given.batch, given.threads)))
        return
    result: dict[str, Any] = {"threads": given.threads, "rounds": given.rounds, "torch": torch.__version__, "rows": []}
    for name in BATCHES:
        sides = {side: partial(measure_apart, side, name, given.threads) for side in SIDES}
        found = interleave(sides, given.rounds)
        for side, each in found.items():
            row: dict[str, Any] = {"batch": name, "side": side}
            for key in each[0]:
                digits = 0 if "faults" in key or "gflop" in key else 3
                row[key] = quartiles([run[key] for run in each], digits)
            for what in ("step", "encoding"):
                ours = [one[f"{what}_cpu_s"] for one in found["all"]]
                row[f"{what}_over_all"] = quartiles([run[f"{what}_cpu_s"] / own for run, own in zip(each, ours)], 3)
                shares = [run[f"{what}_s"] / run[f"{what}_products_s"] for run in each]
                row[f"{what}_over_products"] = quartiles(shares)
                roofs = [run[f"{what}_s"] * run["peak_gflop_per_s"] / run[f"{what}_gflop"] for run in each]
                row[f"{what}_over_roofline"] = quartiles(roofs)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
