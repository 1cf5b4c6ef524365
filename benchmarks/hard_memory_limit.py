"""A run under a hard limit of memory goes on by the ladder, and ends with the weights of the run that began there.

Each run is a process of its own: ESM-2's shape at a few layers, random weights, masked language modelling on generated
chains. First without a limit, which says what training adds to the process's address space; then with the address space
limited (`setrlimit(RLIMIT_AS)`) to what it is before training and 60 % of that, once as Trainer ends (`--oom_policy
stop`) and once with `--oom_policy step_down`; then, without a limit, with the batch on which the ladder ended.

python benchmarks/hard_memory_limit.py --output benchmarks/results/hard_memory_limit.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EsmConfig, EsmForMaskedLM

from hf_ext import FastTrainer, FastTrainingArguments

SHARE = 0.6
ROWS, TOKENS, STEPS = 16, 256, 4
SHAPE = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 20, "num_hidden_layers": 6}


def make_rows() -> Dataset:
    """Chains of half of to all of `TOKENS` residues, of which every seventh is to be predicted."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for size in torch.randint(TOKENS // 2, TOKENS + 1, (ROWS * STEPS,), generator=generator).tolist():
        ids = torch.randint(4, 24, (size,), generator=generator)
        labels = torch.where(torch.arange(size) % 7 == 0, ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return Dataset.from_list(rows)


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [1] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(1).long(), "labels": labels}


def read_status(name: str) -> int:
    """Bytes that the kernel says of this process: VmSize, VmPeak, VmHWM."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def run(rows: int, passes: int, policy: str, allowed_bytes: int | None, folder: str) -> dict[str, Any]:
    """One training run in this process: weights as a hash, losses, bytes."""
    torch.manual_seed(0)
    special = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = EsmForMaskedLM(EsmConfig(**special, **fixed, **SHAPE))
    args = FastTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        oom_policy=policy,
    )
    trainer = FastTrainer(model, args, pad, make_rows())
    torch.ones(8, 8).matmul(torch.ones(8, 8))  # libraries load what they need
    before = read_status("VmSize")
    if allowed_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (before + allowed_bytes, before + allowed_bytes))
    began = time.process_time()
    trainer.train()
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return {
        "added_bytes": read_status("VmPeak") - before,
        "cpu_seconds": round(time.process_time() - began, 2),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rungs": trainer.plan["oom_ladder"].evidence.get("taken", []),
        "weights_sha256": weights.hexdigest(),
    }


def run_alone(**given: Any) -> dict[str, Any]:
    """`run` in a process of its own; of one that fails, the last line it printed."""
    # Tensors in mappings of their own, so that memory that is freed is the process's no longer.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **malloc}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", json.dumps({**given, "folder": folder})]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"exit_status": done.returncode, "error": lines[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(run(**json.loads(given.child))))
        return
    free = run_alone(rows=ROWS, passes=1, policy="stop", allowed_bytes=None)
    allowed = int(SHARE * free["added_bytes"])
    ended = run_alone(rows=ROWS, passes=1, policy="stop", allowed_bytes=allowed)
    stepped = run_alone(rows=ROWS, passes=1, policy="step_down", allowed_bytes=allowed)
    rung = stepped["rungs"][-1]["rung"] if stepped.get("rungs") else ""
    rows = int(rung.split()[0]) if rung.endswith("at a time") else ROWS
    begun = run_alone(rows=rows, passes=ROWS // rows, policy="stop", allowed_bytes=None)
    result = {
        "shape": {**SHAPE, "rows": ROWS, "tokens": TOKENS, "steps": STEPS, "torch": torch.__version__},
        "share": SHARE,
        "allowed_bytes": allowed,
        "without_limit": free,
        "stop": ended,
        "step_down": stepped,
        "begun_on_its_rung": begun,
        "equal_weights": stepped.get("weights_sha256") == begun.get("weights_sha256"),
        "equal_losses": stepped.get("losses") == begun.get("losses"),
    }
    print(json.dumps(result, indent=2))
    if given.output:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
