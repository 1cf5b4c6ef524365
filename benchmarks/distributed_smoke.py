r"""Do the launcher files train on this machine's GPUs, over NCCL, to the weights of one process? One GPU is enough.

    python benchmarks/distributed_smoke.py              # writes benchmarks/results/distributed_smoke_<device>.json
    python benchmarks/distributed_smoke.py --model_size 150M --rows 64 --length 512 --speedups all

Each file of accelerate_configs for several GPUs of one machine is launched on all GPUs that there are: on one GPU DDP,
FSDP2 and ZeRO of a single process. In float32 each must end at the losses and weights of one process, from a saved
folder that loads with no key missing; in half precision rows per second and memory are measured. A launch that fails or
differs makes the exit code 1.

`--device cpu` runs the float32 part on two processes with gloo, to try the script: DDP as it is, FSDP with
what its test puts on the path, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import MASK, SIZES, make_esm2
from datasets import Dataset
from safetensors.torch import load_file
from torch import distributed
from transformers import EsmForMaskedLM

from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.files import write_text
from hf_ext.hardware import detect_hardware
from hf_ext.optional import installed_version
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
ALLOWED = 1e-4  # largest difference of a loss or weight from one process, in float32


@dataclass(frozen=True)
class Launch:
    """One run: a launcher file, the processes that it gets here, its precision, and flags that it needs besides."""

    file: str
    processes: int
    precision: str
    flags: tuple[str, ...] = ()

    def command(self, folder: Path, words: list[str]) -> list[str]:
        """The launcher's command line for this script as a rank."""
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"{CONFIGS / self.file}.yaml"]
        said = ["--num_processes", str(self.processes), "--mixed_precision", self.precision, *self.flags]
        return [*launcher, *said, str(Path(__file__).resolve()), *words, "--rank_output", str(folder)]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Sizes of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script.")
    parser.add_argument("--output_json", help="Where the result goes, if not to benchmarks/results.")
    parser.add_argument("--files", nargs="*", help="Launcher files, without .yaml; else all that this machine can run.")
    parser.add_argument("--model_size", choices=SIZES, default="8M", help="Shape of the ESM-2 with random weights.")
    parser.add_argument("--steps", type=int, default=20, help="Optimizer steps of each run.")
    parser.add_argument("--rows", type=int, default=16, help="Rows per step, over all processes.")
    parser.add_argument("--length", type=int, default=128, help="Tokens of each row.")
    parser.add_argument("--speedups", nargs="*", default=[], help="Of hf_ext, in the runs in half precision.")
    parser.add_argument("--timeout_s", type=float, default=600, help="After which a launch has failed.")
    parser.add_argument("--rank_output", help=argparse.SUPPRESS)
    return parser.parse_args(words)


# --- what is launched -----------------------------------------------------------------------------------------------


def count_devices(device: str) -> int:
    """GPUs of this machine; of a CPU two processes.

    Raises:
        ArgumentError: there is no GPU.
    """
    if device == "cpu":
        return 2
    if not torch.cuda.is_available():
        raise ArgumentError(
            "No GPU: torch sees no CUDA device, so nothing can run over NCCL here. What two processes do on a CPU is "
            "tested by pytest -m nightly tests/test_accelerate_launch.py."
        )
    return torch.cuda.device_count()


def choose_launches(num_devices: int, has_deepspeed: bool) -> list[Launch]:
    """The files for several GPUs of one machine, in float32, each on all; two groups of at least two for HSDP."""
    names = ["ddp", "fsdp2", "fsdp2_offload", *(["zero3"] if has_deepspeed else [])]
    launches = [Launch(name, num_devices, "no") for name in names]
    if num_devices % 2 == 0 and num_devices > 2:
        flags = ("--parallelism_config_dp_shard_size", str(num_devices // 2))
        launches.append(Launch("hsdp", num_devices, "no", flags))
    return launches


# --- a rank ---------------------------------------------------------------------------------------------------------


def make_rows(args: argparse.Namespace) -> Dataset:
    """Random residues; every seventh token is masked and has a label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (args.steps * args.rows, args.length), generator=generator)
    chosen = torch.arange(args.length) % 7 == 1
    inputs, labels = ids.masked_fill(chosen, MASK), ids.masked_fill(~chosen, -100)
    return Dataset.from_dict({"input_ids": inputs.tolist(), "labels": labels.tolist()})


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one length need no padding."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def train(args: argparse.Namespace) -> None:
    """Trains as the launcher asks; the main process writes `rank.json`, all of them the model's folder."""
    folder = Path(args.rank_output)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    each = max(1, args.rows // processes)
    settings: dict[str, Any] = {"max_steps": args.steps, "per_device_train_batch_size": each, "learning_rate": 1e-4}
    settings |= {"effective_batch_size": args.rows, "logging_steps": 1, "save_strategy": "no", "seed": 0}
    settings |= {
        "report_to": "none",
        "disable_tqdm": True,
        "speedups": args.speedups,
    }
    trainer = FastTrainer(
        make_esm2(args.model_size), FastTrainingArguments(str(folder), **settings), collate, make_rows(args)
    )
    trained = trainer.train()
    trainer.save_model()
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    report = {
        "kind": str(trainer.accelerator.distributed_type.value),
        "fsdp_version": plugin.fsdp_version if plugin else None,
        "processes": trainer.args.world_size,
        "backend": distributed.get_backend() if distributed.is_initialized() else None,
        "device": str(trainer.args.device.type),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rows_per_second": trained.metrics.get("train_sequences_per_s"),
        "peak_memory_gib": trained.metrics["train_peak_memory_gib"],
        "plan": [f"{d.name}: {d.status}, {d.reason}" for d in trainer.plan.decisions if d.status != "off"],
    }
    if trainer.is_world_process_zero():
        (folder / "rank.json").write_text(json.dumps(report))
    trainer.end()


# --- comparing ------------------------------------------------------------------------------------------------------


def run(launch: Launch, folder: Path, args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Launches; what rank 0 wrote, or how it failed."""
    folder.mkdir(parents=True)
    plain = ["--speedups"] if launch.precision == "no" else []  # as the reference
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})}
    command = launch.command(folder, [*words, *plain])
    began = time.perf_counter()
    row: dict[str, Any] = {**asdict(launch), "folder": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=args.timeout_s, check=False
        )
        problem = "" if done.returncode == 0 else last_error(done.stderr) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"no end after {args.timeout_s:g} s"
    row["seconds"] = round(time.perf_counter() - began, 1)
    if not problem and not (folder / "model.safetensors").is_file():
        problem = "save_model wrote no weights"
    return {**row, "failed": problem} if problem else {**row, **json.loads((folder / "rank.json").read_text())}


def last_error(printed: str) -> str:
    """The last line that names an error of a rank, not of the launcher that it brought down."""
    lines = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Refused|Ended)\b.*)$", printed, re.MULTILINE)
    own = [line for line in lines if "ChildFailedError" not in line and "CalledProcessError" not in line]
    return own[-1][:500] if own else ""


def compare(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Adds differences from one process, and whether the saved folder loads whole; drops what only they need."""
    folder = Path(row.pop("folder"))
    if "failed" in row:
        return row
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, Path(reference["folder"])))
    row["max_loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True))
    same = ours.keys() == theirs.keys()
    row["max_weight_difference"] = max(float((ours[k] - theirs[k]).abs().max()) for k in ours) if same else None
    _, loading = EsmForMaskedLM.from_pretrained(folder, output_loading_info=True)
    row["missing_keys"] = sorted(loading["missing_keys"])
    if row["precision"] == "no":
        near = same and max(row["max_loss_difference"], row["max_weight_difference"]) <= ALLOWED
        row["passed"] = bool(near and not row["missing_keys"])
    return row


def smoke(args: argparse.Namespace, words: list[str], path: Path | None) -> tuple[Path, list[str]]:
    """All launches of this machine, in float32 against one process, then in half precision for the speed.

    The file is written after each launch. Returns it, and the files whose launch failed or differs.
    """
    num_devices = count_devices(args.device)
    hardware = detect_hardware(args.device)
    launches = choose_launches(num_devices, has_deepspeed=installed_version("deepspeed") is not None)
    launches = [launch for launch in launches if args.files is None or launch.file in args.files]
    alone = Launch("cpu" if args.device == "cpu" else "1gpu_bf16", 1, "no")
    half = "bf16" if hardware.native_bf16 else "fp16" if hardware.native_fp16 else None
    timed = [replace(launch, precision=half) for launch in (alone, *launches) if half and args.device == "cuda"]
    with tempfile.TemporaryDirectory() as scratch:
        reference = run(alone, Path(scratch) / "alone", args, words)
        if "failed" in reference:
            raise ArgumentError(f"One process of {alone.file}.yaml already fails: {reference['failed']}")
        rows = [reference]
        given = {k: v for k, v in vars(args).items() if k not in ("rank_output", "output_json")}
        versions = {name: installed_version(name) for name in ("torch", "accelerate", "transformers", "deepspeed")}
        machine = {"device": hardware.name, "name": hardware.device_name, "count": num_devices, "versions": versions}
        result = {"settings": given, "machine": machine, "allowed": ALLOWED}
        path = path or ROOT / "benchmarks" / "results" / f"distributed_smoke_{hardware.name.lower()}.json"
        for number, launch in enumerate([*launches, *timed]):
            print(f"{launch.file}.yaml, {launch.processes} processes, {launch.precision}", flush=True)
            rows.append(compare(run(launch, Path(scratch) / str(number), args, words), reference))
            result["runs"] = [{name: value for name, value in row.items() if name != "folder"} for row in rows]
            write_text(path, json.dumps(result, indent=1) + "\n")
    return path, [row["file"] for row in rows if "failed" in row or not row.get("passed", True)]


def main(argv: list[str] | None = None) -> int:
    """As a rank: trains. Else launches all and writes the result; returns 1 where a launch failed or differs."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_arguments(words)
    if args.rank_output:
        train(args)
        return 0
    path, wrong = smoke(args, words, Path(args.output_json) if args.output_json else None)
    print(f"{path}: {len(wrong)} wrong {wrong or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
