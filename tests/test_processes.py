"""Launched processes train together, or are refused before any of them begins alone."""

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from miniature_esm import make_esm

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.processes import check_fsdp, check_parallelism, check_together, need_cpu_backend
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


def test_use_cpu_is_for_several_launched_processes_without_an_accelerator(monkeypatch):
    launched = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for launcher, has_accelerator, expected in (
        (launched, False, True),
        (launched, True, False),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False, False),
        ({"WORLD_SIZE": "2"}, False, False),  # of a cluster, not of a launcher: nothing says how to meet
        ({**launched, "ACCELERATE_USE_DEEPSPEED": "true"}, False, False),
        ({}, False, False),
    ):
        for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda given=has_accelerator: given)
        assert need_cpu_backend() is expected


def test_processes_that_would_each_train_alone_are_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    check_together(1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    check_together(3)
    with pytest.raises(ArgumentError, match=r"3 processes .* alone, on all rows.*--use_cpu true"):
        check_together(1)
    with pytest.raises(ArgumentError, match="3 processes were launched"):
        FastTrainingArguments(str(tmp_path))


def test_fsdp_is_refused_where_one_process_would_hold_the_whole_model(monkeypatch, tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True)
    check_fsdp(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PlanRefused, match=r"\(cpu\) accelerate would run a single process"):
        check_fsdp(args)


def test_splitting_by_tensor_context_or_sequence_is_refused_with_what_to_take_and_hsdp_passes(monkeypatch, tmp_path):
    args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for sizes in ({"tp_size": 2}, {"cp_size": 4}, {"sp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}):
        args.parallelism_config = ParallelismConfig(**sizes)
        with pytest.raises(PlanRefused, match=r"cannot split esm, t5: .*fsdp2.*hsdp.*zero3"):
            check_parallelism(args, ("esm", "t5"))
    args.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    check_parallelism(args, ("esm", "t5"))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(PlanRefused, match=r"tp_size=2, cp_size=1, sp_size=1\) cannot split esm"):
        FastTrainer(make_esm(), FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
