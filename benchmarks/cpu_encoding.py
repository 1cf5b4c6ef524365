"""Frozen ESM-2 on a CPU in float32 and under bfloat16 autocast, beside esm-cpp's 8-bit integers: speed and error.

    python benchmarks/cpu_encoding.py [--sizes 8M 35M 650M] [--threads 1 2] [--esm_cpp PYTHON]

Packed rows, 96 chains of 87 to 249 residues with random weights. Of 650M four of the 33 layers are computed. Noise is
that of the probe of `encoder_precision`, cosines are of embeddings with those in float32. esm-cpp takes its turns where
a Python that has it is named (it needs numpy 1), with the same weights and rows. Writes `results/cpu_encoding.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleave, make_esm2, quartiles
from safetensors.torch import save_file
from torch import nn

from hf_ext.models import pack_encoders
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu, fuse_qkv
from hf_ext.speedups.precision import keep_freed_memory

RESULT = Path(__file__).resolve().parent / "results" / "cpu_encoding.json"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8M": ("8M", {}),
    "35M": ("8M", {"hidden_size": 480, "num_hidden_layers": 12, "intermediate_size": 1920}),
    "650M": ("650M", {"num_hidden_layers": 4}),
}
NUM_ROWS, TOKENS = 96, 4096
SIDES = ("float32", "bfloat16")
ESM_CPP = """
import json, time
import esm_cpp, numpy
model = esm_cpp.Model.load_from_safetensors("weights.safetensors")
model.quantize_weights()
rows = [numpy.asarray(row, dtype=numpy.int32) for row in json.load(open("rows.json"))]
for turn in range(2):
    clock, cpu = time.perf_counter(), time.process_time()
    model.forward_scheduled(rows)
    found = time.perf_counter() - clock, time.process_time() - cpu
print(json.dumps(found))
"""


def make_encoder(size: str) -> nn.Module:
    """The encoder as a run on a CPU has it."""
    shape, changes = SHAPES[size]
    model = make_esm2(shape, **changes).eval()
    set_attention(model, "blocked")
    fuse_gelu(model)
    fuse_qkv(model)
    pack_encoders(model)
    return model.esm


@torch.inference_mode()
def encode(encoder: nn.Module, batches: list[dict[str, torch.Tensor]], half: bool) -> tuple[float, float, torch.Tensor]:
    """Seconds by the clock and of the processor, and the mean state of each row."""
    began, used, pooled = time.perf_counter(), time.process_time(), []
    with torch.autocast("cpu", torch.bfloat16, half):
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled.append((encoder(**batch).last_hidden_state * mask).sum(1).float() / mask.sum(1))
    return time.perf_counter() - began, time.process_time() - used, torch.cat(pooled)


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Chains from the longest to the shortest, cut into batches."""
    draw = random.Random(0)
    lengths, batches = sorted((draw.randint(87, 249) for _ in range(NUM_ROWS)), reverse=True), []
    while lengths:
        number = max(1, TOKENS // (lengths[0] + 2))
        now, lengths = lengths[:number], lengths[number:]
        ids = torch.full((len(now), now[0] + 2), 1)
        for row, length in zip(ids, now):
            row[: length + 2] = torch.tensor([0, *draw.choices(range(4, 24), k=length), 2])
        batches.append({"input_ids": ids, "attention_mask": (ids != 1).long()})
    return batches


def save_for_esm_cpp(model: Any, rows: list[list[int]], folder: Path) -> None:
    """Weights of a masked language model, with each layer's table of angles, and ids of rows."""
    weights = {name: weight.contiguous().clone() for name, weight in model.state_dict().items()}
    for number in range(model.config.num_hidden_layers):
        name = f"esm.encoder.layer.{number}.attention.self.rotary_embeddings.inv_freq"
        weights[name] = model.esm.rotary_embeddings.inv_freq.clone()
    save_file(weights, folder / "weights.safetensors", metadata={"format": "pt"})
    (folder / "rows.json").write_text(json.dumps(rows))


def run_esm_cpp(python: str, threads: int, folder: Path) -> tuple[float, float, None]:
    """Seconds by the clock and of the processor, in a fresh process."""
    environment = {**os.environ, "ESM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    command = [python, "-c", ESM_CPP]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    clock, cpu = json.loads(run.stdout.splitlines()[-1])
    return clock, cpu, None


def compare(size: str, rounds: int, threads: int, python: str | None, folder: Path) -> list[dict[str, Any]]:
    """Rows per second of each side, and how far its embeddings are from those in float32."""
    torch.set_num_threads(threads)
    batches = make_batches()
    encoder = make_encoder(size)
    sides: dict[str, Any] = {side: partial(encode, encoder, batches, side != "float32") for side in SIDES}
    if python and size != "650M":
        pairs = ((ids, mask) for batch in batches for ids, mask in zip(batch["input_ids"], batch["attention_mask"]))
        shape, changes = SHAPES[size]
        save_for_esm_cpp(make_esm2(shape, **changes), [ids[mask.bool()].tolist() for ids, mask in pairs], folder)
        sides["esm-cpp, int8"] = partial(run_esm_cpp, python, threads, folder)
    found = interleave(sides, rounds)
    exact = found["float32"][0][2]
    spread = (exact - exact.mean(0)).norm(dim=1).mean()
    rows = []
    for side, each in found.items():
        row = {"size": size, "threads": threads, "side": side}
        row["rows_per_cpu_s"] = quartiles([NUM_ROWS / run[1] for run in each], 1)
        row["rows_per_s"] = quartiles([NUM_ROWS / run[0] for run in each], 1)
        if each[0][2] is not None:
            error = each[0][2] - exact
            row["noise_share"] = round(((error - error.mean(0)).norm(dim=1).mean() / spread).item(), 4)
            row["lowest_cosine"] = round(torch.nn.functional.cosine_similarity(each[0][2], exact).min().item(), 6)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Runs all sizes, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--esm_cpp", help="a Python with esm-cpp")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    keep_freed_memory()
    result: dict[str, Any] = {"rounds": given.rounds, "torch": torch.__version__, "rows": []}
    for threads in given.threads:
        for size in given.sizes:
            with tempfile.TemporaryDirectory() as folder:
                result["rows"] += compare(size, given.rounds, threads, given.esm_cpp, Path(folder))
            given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
