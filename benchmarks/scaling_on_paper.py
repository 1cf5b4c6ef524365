"""What the doctor's model says of more GPUs than anyone measured here: ESM-2 650M and 3B, trained whole, on A100-80GB.

    python benchmarks/scaling_on_paper.py

256 proteins of 1,022 residues, the crops that ESM-2 was trained on; 8 per GPU and pass, 4 passes a step, activations
recomputed. Writes benchmarks/results/scaling_on_paper.json: per size what `recipes/doctor.py --plan_scale` wrote.
Takes seconds; nothing is trained.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import doctor  # noqa: E402

SIZES = ("esm2_650M", "esm2_3B")
ARGUMENTS = [
    *("--device", "a100-80gb", "--plan_scale", "--gpus", "1", "2", "4", "8", "16", "--bf16", "true"),
    *("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4", "--max_steps", "1000"),
    *("--activation_checkpointing", "true", "--max_residues", "1022", "--eval_strategy", "no"),
]


def write_proteins(path: Path, rows: int = 256, length: int = 1022) -> None:
    """FASTA of random residues, the same on every machine."""
    draw = random.Random(0)
    path.write_text("".join(f">{i}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=length))}\n" for i in range(rows)))


def plan(size: str, folder: Path) -> dict[str, Any]:
    """The doctor's rows for one size of ESM-2, and what they rest on."""
    write_proteins(folder / "proteins.fasta")
    files = ["--dataset_name", str(folder / "proteins.fasta"), "--output_dir", str(folder / "run")]
    with contextlib.redirect_stdout(io.StringIO()):
        doctor.main(["--model_size", size, *files, *ARGUMENTS, "--json", str(folder / "doctor.json")])
    return dict(json.loads((folder / "doctor.json").read_text())["scale"])


def main() -> None:
    """Plans every size and writes the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {size: plan(size, Path(folder)) for size in SIZES}
    path = ROOT / "benchmarks" / "results" / "scaling_on_paper.json"
    path.write_text(json.dumps({"arguments": ARGUMENTS, "sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
