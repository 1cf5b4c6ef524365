r"""Do the launcher files train on this machine's GPUs, over NCCL, to the weights of one process? One GPU is enough.

    python benchmarks/distributed_smoke.py --output benchmarks/results/distributed_smoke.json

Each file of accelerate_configs for several GPUs of one machine is launched on all GPUs that there are. In float32 each
must end at the losses and weights of one process, from a saved folder that loads with no key missing. A launch that
fails or differs makes the exit code 1. `--device cpu` launches DDP on two processes with gloo, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import MASK, SIZES, make_esm2
from datasets import Dataset
from safetensors.torch import load_file
from transformers import EsmForMaskedLM

from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.files import write_text
from hf_ext.optional import installed_version
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"
ALLOWED = 1e-4  # largest difference of a loss or weight from one process, in float32
LIMIT_S = 600


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model_size", choices=SIZES, default="8M", help="Shape of the ESM-2 with random weights.")
    parser.add_argument("--steps", type=int, default=20, help="Optimizer steps of each run.")
    parser.add_argument("--rows", type=int, default=16, help="Rows per step, over all processes.")
    parser.add_argument("--length", type=int, default=128, help="Tokens of each row.")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help=argparse.SUPPRESS)
    parser.add_argument("--is_rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def choose_launches(device: str) -> dict[str, list[str]]:
    """File -> flags of the launcher: one process first, then all files for several GPUs; two groups for HSDP.

    Raises:
        ArgumentError: there is no GPU.
    """
    fp32 = ["--mixed_precision", "no"]
    if device == "cpu":
        return {"cpu": fp32, "ddp": ["--num_processes", "2", *fp32]}
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ArgumentError("No GPU: torch sees no CUDA device, so nothing can run over NCCL here.")
    everywhere = ["--num_processes", str(num_gpus), *fp32]
    names = ["ddp", "fsdp2", "fsdp2_offload", *(["zero3"] if installed_version("deepspeed") else [])]
    launches = {"1gpu_bf16": fp32, **dict.fromkeys(names, everywhere)}
    if num_gpus % 2 == 0 and num_gpus > 2:
        launches["hsdp"] = [*everywhere, "--parallelism_config_dp_shard_size", str(num_gpus // 2)]
    return launches


def train(args: argparse.Namespace) -> None:
    """One rank; every seventh token of random residues has a label. Writes `losses.json` and the model's folder."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (args.steps * args.rows, args.length), generator=generator)
    chosen = torch.arange(args.length) % 7 == 1
    columns = {"input_ids": ids.masked_fill(chosen, MASK), "labels": ids.masked_fill(~chosen, -100)}
    columns["attention_mask"] = torch.ones_like(ids)
    rows = Dataset.from_dict({name: column.tolist() for name, column in columns.items()})
    each = max(1, args.rows // int(os.environ.get("WORLD_SIZE", "1")))
    settings: dict[str, Any] = {"max_steps": args.steps, "per_device_train_batch_size": each, "learning_rate": 1e-4}
    settings |= {"effective_batch_size": args.rows, "logging_steps": 1, "save_strategy": "no", "seed": 0}
    settings |= {"report_to": "none", "disable_tqdm": True}
    settings |= {"ddp_backend": args.backend} if "WORLD_SIZE" in os.environ else {}
    trainer = FastTrainer(
        make_esm2(args.model_size), FastTrainingArguments(str(args.output), **settings), train_dataset=rows
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (args.output / "losses.json").write_text(json.dumps(losses))
    trainer.end()


def launch(file: str, flags: list[str], folder: Path, words: list[str], device: str) -> dict[str, Any]:
    """Runs this script as ranks, which train into `folder`; how long it took, and the end of its log if it failed."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{file}.yaml")]
    command += [*flags, str(Path(__file__).resolve()), *words, "--output", str(folder), "--is_rank"]
    began, row = time.perf_counter(), {"file": file, "passed": False}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        failed = done.stderr[-2000:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"no end after {LIMIT_S} s"
    return {**row, "seconds": round(time.perf_counter() - began, 1), **({"failed": failed} if failed else {})}


def differences(folder: Path, reference: Path) -> dict[str, Any]:
    """From one process; and whether the saved folder loads whole."""
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, reference))
    losses = [json.loads((path / "losses.json").read_text()) for path in (folder, reference)]
    of_loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
    of_weight = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    missing = sorted(EsmForMaskedLM.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"])
    passed = max(of_loss, of_weight) <= ALLOWED and not missing
    return {"passed": passed, "loss_difference": of_loss, "weight_difference": of_weight, "missing_keys": missing}


def compare_ranks(words: list[str], device: str, limit_s: float) -> dict[str, Any]:
    """Two ranks, started without a launcher, beside this process, all three at once; what differs.

    Over gloo both may be on one card: NCCL refuses that ("Duplicate GPU detected"), and Accelerate deals out to ranks
    the cards that there are. They are children of this process, so that they end with its group.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    began, ranks = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        given = [*words, "--backend", "gloo", "--is_rank", "--output"]
        for one in ("0", "1"):
            environment = {**os.environ, **hidden, **group, "RANK": one, "LOCAL_RANK": one}
            command = [sys.executable, str(Path(__file__).resolve()), *given, f"{scratch}/ranks"]
            with open(f"{scratch}/{one}.txt", "w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            train(parse_arguments([*given, f"{scratch}/alone"]))
            while (codes := [rank.poll() for rank in ranks]) != [0, 0]:
                if time.perf_counter() - began > limit_s:
                    raise RuntimeError(f"ranks did not end in {limit_s:.0f} s: exit codes {codes}")
                for rank, code in enumerate(codes):
                    if code:
                        lines = Path(f"{scratch}/{rank}.txt").read_text().strip().splitlines() or [""]
                        raise RuntimeError(f"rank {rank} ended with {code}: {lines[-1]}")
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        found = differences(Path(scratch) / "ranks", Path(scratch) / "alone")
    return {"seconds": round(time.perf_counter() - began, 1), **found}


def main(argv: list[str] | None = None) -> int:
    """As a rank: trains. Else launches all and writes the result; returns 1 where a launch failed or differs."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_arguments(words)
    if args.is_rank:
        train(args)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        reference, *others = choose_launches(args.device).items()
        alone = launch(*reference, Path(scratch) / "alone", words, args.device)
        if "failed" in alone:
            raise ArgumentError(f"One process of {reference[0]}.yaml already fails: {alone['failed']}")
        for file, flags in others:
            print(f"{file}.yaml {' '.join(flags)}", flush=True)
            folder = Path(scratch) / file
            row = launch(file, flags, folder, words, args.device)
            rows.append(row if "failed" in row else {**row, **differences(folder, Path(scratch) / "alone")})
            write_text(args.output, json.dumps({"allowed": ALLOWED, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
