r"""Steps of one and of two processes on this CPU (DDP, gloo) beside what benchmarks/scaling.py says of them.

    python benchmarks/scaling_two_processes.py --output_json benchmarks/results/scaling_two_processes_cpu.json
    python benchmarks/scaling_two_processes.py --rounds 10 --rows 1 --length 16 \
        --output_json benchmarks/results/scaling_two_processes_cpu_small_batch.json

Starts two processes of one thread each. In every round each phase runs once: rank 0 alone while rank 1 waits; both side
by side; both under a DDP whose buckets are filled and not sent; both under DDP; the gradients' all-reduce by itself. So
what two processes lose to sharing a CPU, to DDP's own work and to communication is told apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import scaling
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import EsmConfig, EsmForMaskedLM

WIDTH, LAYERS, HEADS = 320, 6, 20  # ESM-2 8M
STRATEGY = "DDP"
DDP_BUCKET = 25 * 2**20  # bytes sent at once: bucket_cap_mb
PHASES = ("one", "two_apart", "two_ddp_silent", "two_ddp")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Sizes of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_json", required=True, help="Where the measurements go.")
    parser.add_argument("--rounds", type=int, default=6, help="Rounds of all phases.")
    parser.add_argument("--steps", type=int, default=4, help="Steps of a phase.")
    parser.add_argument("--rows", type=int, default=4, help="Rows per process and step.")
    parser.add_argument("--length", type=int, default=64, help="Tokens per row.")
    parser.add_argument("--layers", type=int, default=LAYERS, help="Layers of the model, of width 320.")
    return parser.parse_args(words)


class Bench:
    """A model with its twin under DDP, one optimizer each, on one of two ranks."""

    def __init__(self, args: argparse.Namespace):
        config = EsmConfig(
            vocab_size=33,
            hidden_size=WIDTH,
            num_hidden_layers=args.layers,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            position_embedding_type="rotary",
            pad_token_id=1,
            mask_token_id=32,
            token_dropout=False,
        )
        torch.manual_seed(0)
        models = [EsmForMaskedLM(config) for _ in range(2)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("contact_head." not in name)
        self.plain: Any = models[0]
        self.wrapped: Any = DistributedDataParallel(models[1])
        self.bucket_bytes, self.is_silent = 0, False
        self.wrapped.register_comm_hook(None, lambda _, bucket: self._count(bucket))
        self.optimizers = {id(model): torch.optim.AdamW(model.parameters()) for model in (self.plain, self.wrapped)}
        self.ids = torch.randint(4, 24, (args.rows, args.length))
        counts = [parameter.numel() for parameter in self.plain.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in self.plain.parameters())
        self.shape = scaling.Shape(total, sum(counts), args.layers)

    def _count(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """torch's own all-reduce of a bucket, with its bytes counted; nothing is sent while `is_silent`."""
        if self.is_silent:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        self.bucket_bytes += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    def step(self, model: Any) -> tuple[float, float]:
        """One step; seconds of the step and of its backward."""
        began = time.perf_counter()
        loss = model(input_ids=self.ids, labels=self.ids).loss
        middle = time.perf_counter()
        loss.backward()
        after = time.perf_counter()
        self.optimizers[id(model)].step()
        self.optimizers[id(model)].zero_grad()
        return time.perf_counter() - began, after - middle

    def all_reduce(self) -> float:
        """Seconds of an all-reduce of all gradients, in messages of DDP's bucket size, while nothing else runs."""
        buffers = torch.zeros(self.shape.num_trainable).split(DDP_BUCKET // 4)
        dist.barrier()
        began = time.perf_counter()
        for buffer in buffers:
            dist.all_reduce(buffer)
        return time.perf_counter() - began

    def small_message(self) -> float:
        """Seconds of an all-reduce of one number."""
        number = torch.zeros(1)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(number)
        return (time.perf_counter() - began) / 20


def loopback_bytes() -> int | None:
    """Bytes that this machine has sent to itself; None where the system does not tell."""
    counters = Path("/proc/net/dev")
    if not counters.is_file():
        return None
    line = next((line for line in counters.read_text().splitlines() if line.strip().startswith("lo:")), None)
    return int(line.split(":")[1].split()[8]) if line else None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All phases, on one rank of two."""
    torch.set_num_threads(1)
    bench, rank = Bench(args), dist.get_rank()
    seconds: dict[str, list[float]] = {name: [] for name in (*PHASES, "backward")}
    reductions, messages, sent = [], [], []
    for round_ in range(-1, args.rounds):  # round -1 warms up
        bench.bucket_bytes = 0
        phases: dict[str, list[tuple[float, float]]] = {}
        for name in PHASES:
            dist.barrier()
            before = loopback_bytes()
            bench.is_silent = name == "two_ddp_silent"
            model = bench.wrapped if "ddp" in name else bench.plain
            phases[name] = [bench.step(model) for _ in range(args.steps)] if name != "one" or rank == 0 else []
            dist.barrier()
            after = loopback_bytes()
            if name == "two_ddp" and round_ >= 0 and before is not None and after is not None:
                sent.append((after - before) / 2 / args.steps)
        reduction, message = bench.all_reduce(), bench.small_message()
        if round_ < 0:
            continue
        reductions.append(reduction)
        messages.append(message)
        for name, times in phases.items():
            seconds[name] += [statistics.median(total for total, _ in times)] if times else []
        seconds["backward"].append(statistics.median(backward for _, backward in phases["two_ddp_silent"]))
    return {
        "seconds": seconds,
        "all_reduce": reductions,
        "small_message": messages,
        "loopback_bytes": sent,
        "bucket_bytes": bench.bucket_bytes / args.steps,
        "shape": vars(bench.shape),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of the rounds."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values)}


def compare(measured: dict[str, Any]) -> dict[str, Any]:
    """Predictions from the parts (compute, bandwidth) beside the measured step of two processes under DDP."""
    shape = scaling.Shape(**measured["shape"])
    parts = scaling.transfers(scaling.Layout(STRATEGY, 2, 2, half=False), shape)
    times = {name: spread(values) for name, values in measured["seconds"].items()}
    reduction = statistics.median(measured["all_reduce"])
    message_s = statistics.median(measured["small_message"])
    overhead = max(1, math.ceil(parts[0].num_bytes / DDP_BUCKET)) * message_s
    bandwidth = scaling.sent_bytes(parts) / (reduction - overhead)
    # nccl-tests, doc/PERFORMANCE.md: "overhead + size / bw"
    sending = overhead + scaling.sent_bytes(parts) / bandwidth
    one, apart, silent, together = (times[name]["median"] for name in PHASES)
    share = times["backward"]["median"] / silent
    rounds = zip(measured["seconds"]["two_ddp_silent"], measured["seconds"]["two_ddp"], strict=True)

    def predict(compute: float) -> dict[str, float]:
        hidden = compute * share  # DDP sends while backward runs (Li et al., arXiv:2006.15704, section 3.2.3)
        return {"no_overlap_s": compute + sending, "full_overlap_s": compute + max(0.0, sending - hidden)}

    return {
        "bytes_per_step": {
            "formula": scaling.sent_bytes(parts),
            "ddp_buckets": measured["bucket_bytes"],
            "loopback": spread(measured["loopback_bytes"]) if measured["loopback_bytes"] else None,
        },
        "step_s": times,
        "backward_share": share,
        "all_reduce_s": spread(measured["all_reduce"]),
        "small_message_s": message_s,
        "bandwidth_gb_per_second": bandwidth / 1e9,
        "predicted_from_one_process": predict(one),
        "predicted_from_two_that_send_nothing": predict(silent),
        "measured_s": together,
        "measured_over_predicted_no_overlap": spread([ddp / (compute + sending) for compute, ddp in rounds]),
        "slower_by_sharing_the_cpu": apart / one,
        "slower_by_ddp_without_sending": silent / apart,
        "slower_by_communication": together / silent,
        "efficiency_measured": one / together,
        "efficiency_without_sharing_the_cpu": apart / together,
    }


def load() -> float:
    """Processes that wanted a core in the last minute, on average."""
    return round(os.getloadavg()[0], 2)


def describe_machine() -> dict[str, Any]:
    """What the two processes share."""
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return {
        "cpus": os.cpu_count(),
        "threads_of_core_0": siblings.read_text().strip() if siblings.is_file() else None,
        "platform": platform.machine(),
        "torch": torch.__version__,
        "load_before": load(),
    }


def main() -> None:
    """Without a launcher: starts two ranks. As a rank: measures, and rank 0 writes the file."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*launcher, *sys.argv], env=environment, check=False).returncode)
    dist.init_process_group("gloo")
    machine = describe_machine()
    measured = measure(args)
    if dist.get_rank() == 0:
        result = {"settings": {k: v for k, v in vars(args).items() if k != "output_json"}, "machine": machine}
        machine["load_after"] = load()
        result |= {"shape": measured["shape"], "threads_per_process": 1, **compare(measured)}
        Path(args.output_json).write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo aborts now and then when an interpreter with a living DDP model ends


if __name__ == "__main__":
    main()
