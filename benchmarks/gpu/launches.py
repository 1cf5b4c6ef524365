"""DDP, FSDP2 and ZeRO over NCCL on the GPUs that there are, one is enough: `benchmarks/distributed_smoke.py`.

On a CPU it is DDP alone, over gloo with two processes.
"""

from __future__ import annotations

from typing import Any

import distributed_smoke

from hf_ext.optional import installed_version

from .work import Work

FILES = ("ddp", "fsdp2", "zero3")
TOY = ["--device", "cpu", "--model_size", "tiny", "--steps", "2", "--rows", "4", "--length", "12"]


def measure(work: Work) -> None:
    """Reports a row per launch, in float32 beside one process and then in half precision."""
    left_out: dict[str, str] = {}
    files = list(FILES)
    if installed_version("deepspeed") is None:
        left_out["ZeRO"] = "deepspeed is not installed"
        files = [name for name in files if "zero" not in name]
    if work.device.type == "cpu":
        left_out |= {"FSDP2": "on a CPU accelerate would run DDP", "NCCL": "no GPU"}
        files = ["ddp"]
    words = [*(TOY if work.is_toy and work.device.type == "cpu" else []), "--files", *files]
    words += ["--timeout_s", f"{max(work.left_s / 2, 30):.0f}"]  # one that hangs leaves time for others

    def save(rows: list[dict[str, Any]]) -> None:
        work.report(runs=[{name: value for name, value in row.items() if name != "plan"} for row in rows])

    work.report(not_run=left_out)
    result = distributed_smoke.smoke(distributed_smoke.parse_arguments(words), words, save)
    save(result["runs"])
    wrong = [row["file"] for row in result["runs"] if "failed" in row or not row.get("passed", True)]
    work.report(allowed_difference=result["allowed"], wrong=wrong)
