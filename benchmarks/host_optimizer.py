"""Steps in host memory: what they add to a step on the device, and what they save there.

The shape of ESM-2 150M (640 wide) with random weights and `--layers` of its 30 layers: forward and backward over 1,024
tokens, then the same step by AdamW and by Muon with AdamW, on the device and on the host, in turn. Medians and
quartiles of wall time, and the CPU time of the process, which other work on the machine does not stretch. On a CPU
"device" and host are one memory: the copies are there, the way between two memories is not.

OMP_NUM_THREADS=1 python benchmarks/host_optimizer.py --output benchmarks/results/host_optimizer_cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import EsmConfig, EsmForMaskedLM

from hf_ext.hardware import detect_hardware
from hf_ext.models.host_optimizer import HostOptimizer, move_to_host
from hf_ext.models.muon import MuonAdamW, block_matrices

ROWS, LENGTH = 2, 512
ACCUMULATION = (1, 4, 16, 64)


def build_model(layers: int, device: torch.device) -> nn.Module:
    """Layers of ESM-2 150M."""
    torch.manual_seed(0)
    shape = {"hidden_size": 640, "num_attention_heads": 20, "intermediate_size": 2560, "num_hidden_layers": layers}
    tokens = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
    model = EsmForMaskedLM(EsmConfig(**shape, **tokens, token_dropout=True))
    model.esm.contact_head.requires_grad_(False)
    return model.to(device)


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Adds to no memory before its first step."""
    adamw = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    return MuonAdamW(adamw, block_matrices(model)) if name == "muon" else adamw


class Stopwatch:
    """Wall and CPU seconds of actions, by name; the device is waited for."""

    def __init__(self, device: torch.device):
        self._device = device
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def run(self, name: str, action: Callable[[], Any]) -> None:
        """Calls `action`."""
        self._wait()
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        self._wait()
        self.wall.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)

    def summarize(self, name: str) -> dict[str, float]:
        """Without the first, in which memory is reserved."""
        low, median, high = statistics.quantiles(self.wall[name][1:], n=4)
        return {"median_s": median, "q1_s": low, "q3_s": high, "cpu_median_s": statistics.median(self.cpu[name][1:])}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure(layers: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Every optimizer on the device and on the host, by turns, on the gradients of one pass."""
    model, watch = build_model(layers, device), Stopwatch(device)
    ids = torch.randint(4, 24, (ROWS, LENGTH), device=device)

    def run_pass() -> None:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            model(input_ids=ids, labels=ids).loss.backward()

    on_host: dict[str, HostOptimizer] = {name: move_to_host(make_optimizer(name, model)) for name in ("adamw", "muon")}
    actions: dict[str, Callable[[], Any]] = {"pass": run_pass}
    for name, optimizer in on_host.items():
        actions |= {f"{name} device": make_optimizer(name, model).step, f"{name} host": optimizer.step}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            watch.run(name, action)
    rows = [_row(name, optimizer, watch) for name, optimizer in on_host.items()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"num_trained": trained, "tokens": ids.numel(), "pass": watch.summarize("pass"), "optimizers": rows}


def _row(name: str, optimizer: HostOptimizer, watch: Stopwatch) -> dict[str, Any]:
    device, host = watch.summarize(f"{name} device"), watch.summarize(f"{name} host")
    passes = watch.summarize("pass")["median_s"]
    shares = {str(num): host["median_s"] / (num * passes + host["median_s"]) for num in ACCUMULATION}
    return {
        "optimizer": name,
        "on_device": device,
        "on_host": host,
        "added_s": host["median_s"] - device["median_s"],
        "share_of_step_by_passes": shares,
        "state_bytes_off_the_device": optimizer.state_bytes(),
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "machine": detect_hardware(device).name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": args.layers,
        "repeats": args.repeats,
        **measure(args.layers, args.repeats, device),
        "between_host_and_card": "measured" if device.type == "cuda" else "not measured",
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
