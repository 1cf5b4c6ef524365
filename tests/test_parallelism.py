"""Splitting encoders by tensor, context or sequence is refused with what to take instead; HSDP is let through."""

import pytest
from accelerate.parallelism_config import ParallelismConfig
from miniature_esm import make_esm

from hf_ext.errors import PlanRefused
from hf_ext.processes import check_parallelism
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {"use_cpu": True, "report_to": "none"}


def check(families=("esm", "t5"), **sizes) -> None:
    args = FastTrainingArguments("o", **QUIET)
    args.parallelism_config = ParallelismConfig(**sizes)
    check_parallelism(args, families)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp_size": 2}, r"^tensor parallel over 2 processes: esm, t5 cannot"),
        ({"cp_size": 4}, r"^context parallel over 4 processes: "),
        ({"sp_size": 2}, r"^sequence parallel over 2 processes: "),
        ({"tp_size": 2, "dp_shard_size": 2, "cp_size": 2}, r"^tensor .* 2 processes and context parallel over 2 "),
    ],
)
def test_what_these_encoders_cannot_be_split_by_is_refused_with_fsdp2_hsdp_and_zero(sizes, says):
    with pytest.raises(PlanRefused, match=says) as refusal:
        check(**sizes)
    for instead in ("4gpu_fsdp2.yaml", "8gpu_hsdp.yaml", "4gpu_zero2.yaml"):
        assert instead in str(refusal.value)


def test_sharded_and_replicated_data_parallel_passes():
    check(dp_replicate_size=2, dp_shard_size=4)
    check(dp_shard_size=8)


def test_the_launchers_setting_is_refused_before_the_model_is_touched(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    model = make_esm()
    with pytest.raises(PlanRefused, match="tensor parallel over 2 processes: esm cannot"):
        FastTrainer(model, FastTrainingArguments(str(tmp_path), **QUIET))
