"""Peak memory of training steps, predicted by the ledger and measured, for ESM-2 shapes of 150M and 650M.

Each case runs in a process of its own, on one thread: two optimizer steps of masked language modelling on random
weights and random tokens. Measured is the most that torch's allocator held: on a CPU by its own memory events
(torch.profiler), on a card by `torch.cuda.max_memory_allocated`. The prediction is made from the configuration.

python benchmarks/memory_ledger.py --output benchmarks/results/memory_ledger_cpu.json

Cases that the file already has are predicted anew, and not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import SIZES, make_esm2
from torch import nn

from hf_ext.data import BatchLayout, VarlenLayout
from hf_ext.memory import MemoryModel, TrainConfig
from hf_ext.models import LoraSettings, find_base_layers, narrow, pack_encoders, wrap_with_lora
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import all_tokens, fuse_gelu

STEPS = 2


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        trains: "full", "lora" or "frozen" (the head alone).
        padded: the last row is half padding, so that attention has a mask; packed rows have none.
    """

    name: str
    size: str = "150M"
    trains: str = "full"
    rows: int = 8
    length: int = 128
    recomputes: bool = False
    half: bool = False
    half_base: bool = False
    optimizer: str = "adamw_torch_fused"
    attention: str = "sdpa"
    packed: bool = False
    fused_gelu: bool = False
    passes: int = 1
    padded: bool = True


ALL = {"half": True, "fused_gelu": True, "recomputes": True}
CASES = [
    Case("full"),
    Case("full, eager attention", attention="eager"),
    Case("full, fused GELU", fused_gelu=True),
    Case("full, packed", packed=True),
    Case("full, 2 passes per step", passes=2, rows=4),
    Case("full, bf16", half=True),
    Case("full, bf16, recomputing all", half=True, recomputes=True),
    Case("full, AdamW in 8 bits", optimizer="adamw_8bit"),
    Case("full, recomputing all", recomputes=True),
    Case("full, all together", optimizer="adamw_8bit", **ALL),  # type: ignore[arg-type]
    Case("LoRA", trains="lora"),
    Case("LoRA, bf16", trains="lora", half=True),
    Case("LoRA, bf16, half base", trains="lora", half=True, half_base=True),
    Case("LoRA, all together", trains="lora", half_base=True, packed=True, **ALL),  # type: ignore[arg-type]
    Case("frozen", trains="frozen"),
    Case("650M LoRA, bf16", "650M", "lora", rows=4, half=True),
    Case("650M frozen", "650M", "frozen", rows=4),
    Case("650M full, recomputing all", "650M", rows=4, recomputes=True),
]


def make_model(case: Case) -> Any:
    """On the meta device, with what the case switches on in the model itself."""
    with torch.device("meta"):
        model: Any = make_esm2(case.size, token_dropout=True, max_position_embeddings=1026)
        if case.trains == "frozen":
            model.esm.requires_grad_(False)
        if case.trains == "lora":
            model = wrap_with_lora(model, LoraSettings(r=8))
        if case.half_base:
            narrow(find_base_layers(model), torch.bfloat16)
    if case.packed:
        set_attention(model, "blocked")
        pack_encoders(model)
    elif case.attention == "eager":
        model.set_attn_implementation("eager")
    if case.fused_gelu:
        fuse_gelu(model)
    all_tokens(model)
    return model.train()


def make_batch(case: Case, rows: int) -> dict[str, Any]:
    """Random residues; 15 % of the tokens have a label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (rows, case.length), generator=generator)
    mask = torch.ones_like(ids)
    if case.padded:
        mask[-1, case.length // 2 :] = 0
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.15, -100)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if case.packed:
        batch["layout"] = BatchLayout(tuple(ids.shape), VarlenLayout.from_mask(mask))
    return batch


def predict(case: Case, kind: str = "cpu") -> dict[str, Any]:
    """The ledger's forecast."""
    model = make_model(case)
    memory = MemoryModel(model, lambda rows: make_batch(case, rows), kind=kind, scales=not case.packed)
    config = TrainConfig(case.rows, case.recomputes, case.half, optimizer=case.optimizer, passes=case.passes)
    found = memory.forecast(config)
    return {"bytes": found.peak, "moment": found.moment, "lines": dict(found.lines())}


def fill(model: nn.Module, device: str = "cpu") -> nn.Module:
    """Real weights for a model on the meta device: each tensor once, every page touched."""
    model.to_empty(device=device)
    model.tie_weights()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def make_optimizer(case: Case, model: nn.Module) -> Any:
    """As Trainer makes it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw_8bit":
        import bitsandbytes

        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
        return bitsandbytes.optim.AdamW(trained, lr=1e-5, optim_bits=8)
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def train(case: Case, device: str = "cpu") -> None:
    """Takes `STEPS` optimizer steps."""
    model = fill(make_model(case), device)
    if case.recomputes:
        model.activation_checkpointing_enable()
    optimizer = make_optimizer(case, model)
    batch = {name: part.to(device) for name, part in make_batch(case, case.rows).items()}
    for _ in range(STEPS):
        for _ in range(case.passes):
            with torch.autocast(device, torch.bfloat16) if case.half else nullcontext():
                loss = model(**batch).loss
            loss.backward()
            del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure(case: Case, device: str) -> dict[str, Any]:
    """Most that torch's allocator held at one moment. A tiny model first loads what a first step loads."""
    for half in (False, True):
        train(Case("", "tiny", rows=2, length=16, half=half), device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(case, device)
        return {"bytes": torch.cuda.max_memory_allocated() - before}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(case)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return {"bytes": peak, "events": len(changes)}


def measure_apart(case: Case, device: str) -> dict[str, Any]:
    """`measure` in a fresh process; `failed`, the end of its log, where the case does not fit."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        words = ["--device", device, "--size", case.size, "--output", file.name, "--measure", case.name]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
        return {"failed": done.stderr[-300:]} if done.returncode else json.load(file)


def main() -> None:
    """All cases, or one measurement of one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--size", choices=SIZES, help="Of all cases, instead of each its own.")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = {case.name: replace(case, size=args.size or case.size) for case in CASES}
    if args.measure:
        args.output.write_text(json.dumps(measure(cases[args.measure], args.device)))
        return
    torch.set_num_threads(1)
    known = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    measured = {row["case"]: row["allocations"] for row in known}
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        case = cases[name]
        row = {"case": name, "settings": asdict(case), "predicted": predict(case, args.device)}
        row["allocations"] = measured.get(name) or measure_apart(case, args.device)
        if "bytes" in row["allocations"]:
            row["predicted_by_allocations"] = round(row["predicted"]["bytes"] / row["allocations"]["bytes"], 4)
        rows.append(row)
        print(name, row["predicted"]["bytes"] / 2**30, row["allocations"], flush=True)
        written = {"torch": torch.__version__, "threads": 1, "steps": STEPS, "rows": rows}
        args.output.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
