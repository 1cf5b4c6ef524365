"""How a trained model is run, for commands that read it and train nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .checks import COUNT, check_ranges, ranges_in_types
from .training_fields import CACHE_DIR, option

# Those that predictions gain from; `attention`, so that what is put into the cache is what training would compute.
SPEEDUPS = ["cpu_matmul", "tf32", "fused_gelu", "attention", "embedding_cache", "data_loading"]


@dataclass
class PredictingArguments:
    """Device, precision, rows at a time, speed-ups, and where embeddings are kept."""

    _argument_group_name = "computing"  # in --help

    use_cpu: bool = option(False, "Compute on the CPU where there is an accelerator.")
    bf16: bool = option(False, "Compute in bfloat16.")
    fp16: bool = option(False, "Compute in float16.")
    per_device_eval_batch_size: Annotated[int, COUNT] = option(256, "Rows at a time on each device.")
    embedding_cache_dir: str = option(CACHE_DIR, "Where embeddings of frozen encoders are kept.")
    speedups: list[str] = option(SPEEDUPS, "Speed-ups to use where they fit: names, or 'all'.")
    without: list[str] = option([], "Speed-ups to leave out.")
    disable_tqdm: bool = option(False, "Show no progress bars.")

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(PredictingArguments))
