r"""The first half hour on a card that nobody has measured: one command, numbers after each of its parts.

    python benchmarks/gpu_session.py              # writes benchmarks/results/gpu_session.json
    python benchmarks/gpu_session.py --parts encoding memory --minutes 5
    python benchmarks/gpu_session.py --size toy --output /tmp/toy.json    # tiny shapes, also on a CPU: does it run?

Each part is a command in a process of its own with a time limit; `PARTS` says which. One that fails, crashes, hangs or
is out of memory is written down with the end of its log, and the next begins. Started again, parts that finished on the
same commit are not repeated. The exit code is 1 where a part did not finish.

faesm's flash kernel and the package flash-attn are tested and measured where flash-attn is installed: pip install
--no-build-isolation -e ".[flash]" takes nvcc, or a wheel for this torch. Elsewhere they read "not measured".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import make_esm2
from transformers import EsmcConfig, EsmcForMaskedLM, EsmTokenizer

from hf_ext.data import ESM_VOCABULARY
from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.files import write_text
from hf_ext.hardware import Hardware, detect_hardware
from hf_ext.optional import installed_version

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
# Part -> minutes of 30; what earlier parts leave is shared out among the later ones. In order of worth. On an H100
# tests took 25 s and encoding 80 s; full_esm2 did not end in 3 minutes, lora_esm2 not in 1.6, memory not in 0.8.
PARTS = {
    "tests": 1.0,
    "encoding": 2.0,
    "attention": 1.5,
    "full_esm2": 5.5,
    "lora_esm2": 5.0,
    "full_esmc": 5.0,
    "lora_esmc": 4.0,
    "memory": 3.0,
    "processes": 3.0,
}
MODELS = {"esm2": "ESM-2 650M", "esmc": "ESM C 300M"}
GRACE_S = 10.0  # between asking a part to end, which launchers hand on to their ranks, and ending it
LOG_LINES = 30


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy: tiny shapes, no numbers.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="All by default, in this order.")
    parser.add_argument("--output", type=Path, default=BENCHMARKS / "results" / "gpu_session.json")
    parser.add_argument("--minutes", type=float, default=30.0, help="Of the whole session.")
    return parser.parse_args(words)


def draw_chains(number: int, is_toy: bool) -> list[str]:
    """Random residues; lengths are log-normal about 270 between 30 and 1,022, as proteins' are, and 6 to 24 of toys."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(number, generator=generator) * 0.7 + 5.6).exp().clamp(30, 1022)
    if is_toy:
        lengths = torch.randint(6, 25, (number,), generator=generator)
    drawn = [torch.randint(0, 20, (int(length),), generator=generator).tolist() for length in lengths]
    return ["".join("ACDEFGHIKLMNPQRSTVWY"[i] for i in row) for row in drawn]


def build_model(family: str, is_toy: bool) -> Any:
    """A masked language model with random weights, always the same."""
    if family == "esm2":
        shape = {"token_dropout": True, "layer_norm_eps": 1e-5, "max_position_embeddings": 1026}
        return make_esm2("tiny" if is_toy else "650M", **shape)
    width, layers, heads, inner = (32, 2, 2, 64) if is_toy else (960, 30, 15, 2560)
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return EsmcForMaskedLM(EsmcConfig(**sizes, intermediate_size=inner))


def build_tokenizer(folder: Path) -> EsmTokenizer:
    """ESM-2's, whose ids are also those of ESM C; by way of a file in `folder`."""
    (folder / "vocab.txt").write_text("\n".join(ESM_VOCABULARY) + "\n")
    return EsmTokenizer(str(folder / "vocab.txt"), model_max_length=1024)


def compare_command(part: str, size: str, hardware: Hardware, folder: Path) -> list[str]:
    """`hf-ext compare` of `max_speed` with Trainer at its best on the same rows, masked language modelling."""
    training, family = part.split("_")
    is_toy, roomy = size == "toy", hardware.memory_gib is not None and hardware.memory_gib >= 40
    table = folder / "chains.csv"
    table.write_text("\n".join(["sequence", *draw_chains(256 if is_toy else 2048, is_toy)]) + "\n")
    half = "bf16" if hardware.native_bf16 else "fp16" if hardware.native_fp16 else None
    # Stock Trainer has no LoRA: there it is ours without a speed-up, as Trainer is with PEFT.
    baseline: dict[str, Any] = {"preset": "baseline", "train_sampling_strategy": "group_by_length"}
    baseline |= {"stock_trainer": True} if training == "full" else {}
    baseline |= {half: True} if half and hardware.kind == "cuda" else {}
    (folder / "trainer.yaml").write_text(json.dumps(baseline))
    for made in (build_model(family, is_toy), build_tokenizer(folder)):  # as from the Hub: LoRA adapts no new model
        made.save_pretrained(folder / "model")
    words = ["--recipe", "mlm", "--baseline", str(folder / "trainer.yaml"), "--rounds", "1" if is_toy else "2"]
    words += ["--output_dir", str(folder / "runs")]
    rows, passes = (2, 2) if is_toy else (16, 4) if roomy else (4, 2)
    shared = f"--dataset_name {table} --sequence_columns sequence --split random --split_sizes 0.98 0.01 0.01"
    shared += f" --per_device_train_batch_size {rows} --gradient_accumulation_steps {passes} --max_steps 12"
    shared += f" --eval_strategy no --save_strategy no --model_name_or_path {folder / 'model'}"
    shared += " --use_peft true" if training == "lora" else ""
    return ["-m", "hf_ext", "compare", *words, "--", *shared.split()]


def make_command(part: str, size: str, hardware: Hardware, folder: Path) -> list[str]:
    """The words after `python` of a part. Without a GPU tests are collected only, and DDP alone is launched."""
    is_toy, device = size == "toy", "cuda" if hardware.kind == "cuda" else "cpu"
    result = ["--output", str(folder / "result.json")]
    if part == "tests":
        marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        words = ["-m", "pytest", "-o", "addopts=", "-m", "gpu", "--disable-warnings", "-rs"]
        return [*words, *(["--collect-only"] if device == "cpu" else []), *marked]
    if part in ("encoding", "attention"):
        kernels = ["--kernels"] if part == "attention" else []
        return [str(BENCHMARKS / "gpu_encoding.py"), "--size", size, *kernels, *result]
    if part == "memory":
        cases = ["full", "LoRA"] if is_toy else ["full", "full, bf16", "full, all together", "LoRA, bf16", "frozen"]
        shape = ["--size", "tiny"] if is_toy else ["--size", "650M"]
        return [str(BENCHMARKS / "memory_ledger.py"), "--device", device, *shape, "--cases", *cases, *result]
    if part == "processes":
        small = ["--model_size", "tiny", "--steps", "2", "--rows", "4", "--length", "12"] if is_toy else []
        return [str(BENCHMARKS / "distributed_smoke.py"), "--device", device, *small, *result]
    return compare_command(part, size, hardware, folder)


def run_part(part: str, size: str, hardware: Hardware, limit_s: float) -> dict[str, Any]:
    """The entry of a part: status, seconds, what it wrote, and the end of its log where it did not finish."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, *make_command(part, size, hardware, folder)]
        visible = {} if part == "processes" else {"CUDA_VISIBLE_DEVICES": "0"}  # Trainer would split batches over all
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **(visible if hardware.kind == "cuda" else {}), "PYTHONPATH": paths}
        log, began = folder / "log.txt", time.monotonic()
        with log.open("w") as stream:
            given: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, **given)
            try:
                code = process.wait(limit_s)
                status = "finished" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                status = "timed out"
            finally:
                end_group(process)
        entry: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        entry["result"] = read_result(folder)
        if status != "finished" or entry["result"] is None:
            lines = log.read_text(errors="replace").replace(str(ROOT), "PROJECT").replace(name, "TMP").splitlines()
            entry["log_end"] = lines[-LOG_LINES:]
        return entry


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process and what it started, where it has not ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def read_result(folder: Path) -> Any:
    """What a part wrote; of a comparison, what the table shows."""
    if (folder / "result.json").is_file():
        return json.loads((folder / "result.json").read_text())
    if not (path := folder / "runs" / "comparison.json").is_file():
        return None
    found = json.loads(path.read_text())
    kept = ("rate", "peak_memory_gib", "final_loss")
    sides = {name: {key: side[key] for key in kept} for name, side in found["sides"].items()}
    ratios = {name: pair["ratio"] for name, pair in found["against"].items()}
    return {"unit": found["unit"], "rounds": found["rounds"], "sides": sides, "times_as_fast": ratios}


def describe_session(size: str, hardware: Hardware) -> dict[str, Any]:
    """What was measured, and on what; a file of another is never overwritten."""
    commit = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        code = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a downloaded folder
        code = "unknown"
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "flash-attn")
    versions = {name: installed_version(name) for name in names}
    machine = {"device": hardware.name, "kind": hardware.kind, "memory_gib": hardware.memory_gib}
    return {"size": size, "machine": machine, "commit": code, "versions": versions, "parts": {}}


def open_session(path: Path, session: dict[str, Any]) -> dict[str, Any]:
    """The session with the parts that ran on the same commit, if the file has some.

    Raises:
        ArgumentError: it holds something else, or a session of another machine or size.
    """
    if not path.exists():
        return session
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        is_same = (kept["machine"], kept["size"]) == (session["machine"], session["size"])
        parts = {name: part for name, part in kept["parts"].items() if part["status"]}
        is_current = kept["commit"] == session["commit"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: holds no session ({type(error).__name__}). Give another --output.") from error
    if not is_same:
        raise ArgumentError(f"{path}: a session of another machine or --size. Give another --output, or move it away.")
    return {**session, "parts": parts if is_current else {}}


def main(words: list[str] | None = None) -> int:
    """Runs the parts that are not done and writes the file after each; 1 where one did not finish."""
    args = parse_arguments(words)
    hardware = detect_hardware()
    if hardware.kind != "cuda" and args.size == "full":
        raise ArgumentError("No GPU: torch sees no CUDA device. --size toy says whether the session runs, on a CPU.")
    session = open_session(args.output, describe_session(args.size, hardware))
    done = {part for part, entry in session["parts"].items() if entry["status"] == "finished"}
    left = [part for part in PARTS if part in args.parts and part not in done]
    print(f"{hardware.name}, {session['commit']} -> {args.output}: {', '.join(left) or 'all parts finished before'}")
    if "tests" in left and not session["versions"]["flash-attn"]:
        print("flash-attn is not installed: it and faesm are not measured. pip install -e '.[flash]' brings it.")
    ends = time.monotonic() + 60 * args.minutes
    for number, part in enumerate(left):
        share = PARTS[part] / sum(PARTS[each] for each in left[number:])
        limit_s = max(1.0, share * (ends - time.monotonic()))
        print(f"{part}: at most {limit_s:.0f} s", flush=True)
        entry = session["parts"][part] = run_part(part, args.size, hardware, limit_s)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output, json.dumps(session, indent=1) + "\n")
        print(f"{part}: {entry['status']} after {entry['seconds']:.0f} s", flush=True)
    return 0 if all(session["parts"][part]["status"] == "finished" for part in args.parts) else 1


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
