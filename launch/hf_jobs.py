# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_ext"]
# [tool.uv.sources]
# hf_ext = { path = "/wheels/hf_ext-0.1.0-py3-none-any.whl" }
# ///
"""Hugging Face Jobs: all GPUs of one machine, and a bucket in which the run goes on.

    pip wheel --no-deps --wheel-dir dist .
    hf jobs uv run --flavor a10g-largex2 --timeout 8h --attempts 20 -v ./dist:/wheels \
        -v hf://buckets/USER/BUCKET:/outputs launch/hf_jobs.py --max_hours 7.5 --config gb1.yaml

What follows the file are flags of `hf-ext train`; give files and data by folders that are mounted with -v. The first
line builds the wheel that the second mounts, and that the header names: no other is taken. Before `--max_hours`, which
must be less than --timeout, the run saves and stops; Jobs repeats what did not end with 0 up to --attempts times,
whatever the status was, and the next attempt goes on from the bucket. Checked so far: this header by uv, the command
that is built, and what `hf jobs uv run --dry-run` makes of the line above (huggingface_hub 2.4); not run on Jobs.
"""

import os
import sys

import torch

# ---- edit ----
OUTPUT_DIR = "/outputs/run"  # in the bucket
# A bucket knows no renames: checkpoints are written here and copied whole.
LOCAL_CHECKPOINT_DIR = "/tmp/checkpoints"
GRACE_S = 110  # for ranks to save after a signal; 30 of torch's own
# ---- end of what to edit ----


def command(flags: list[str], num_processes: int) -> list[str]:
    """What is launched: as many processes as there are GPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    folders = ["--output_dir", OUTPUT_DIR, "--local_checkpoint_dir", LOCAL_CHECKPOINT_DIR]
    return [*launcher, "-m", "hf_ext", "train", *folders, *flags]


if __name__ == "__main__":
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # of one machine, NCCL's own choices for the rest
    os.execv(sys.executable, command(sys.argv[1:], max(1, torch.cuda.device_count())))
