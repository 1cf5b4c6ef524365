"""What the parts of `hf_ext.training` take, without a Trainer."""

from pathlib import Path
from typing import Any

from hf_ext.training_args import FastTrainingArguments


def make_args(folder: Path, **given: Any) -> FastTrainingArguments:
    """Arguments of a run on the CPU."""
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)
