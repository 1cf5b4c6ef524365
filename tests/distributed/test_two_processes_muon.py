"""Muon on two real processes, DDP and FSDP2: the losses and weights of one, and an exact resume."""

import json

import muon_sharded_on_ranks
import pytest
import torch
from closeness import largest
from locations import HELPERS
from muon_on_ranks import make_model, train, weights
from ranks import run_on_ranks
from run_outcomes import losses
from safetensors.torch import load_file


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return largest((ours[name] - theirs[name]).abs().max() for name in ours)


@pytest.mark.nightly
def test_two_processes_train_with_muon_as_one_does_and_resume_bit_for_bit(tmp_path):
    run_on_ranks(HELPERS / "muon_on_ranks.py", tmp_path)
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    assert [report["world_size"] for report in reports] == [2, 2]
    whole = [load_file(tmp_path / f"whole-{rank}.safetensors") for rank in range(2)]
    assert largest_difference(*whole) == 0.0
    assert largest_difference(whole[0], load_file(tmp_path / "resumed-0.safetensors")) == 0.0

    alone = train(tmp_path / "alone", 4)
    assert len(losses(alone)) == len(reports[0]["losses"]) == 20
    assert largest(abs(a - b) for a, b in zip(losses(alone), reports[0]["losses"])) < 1e-4
    assert largest_difference(whole[0], weights(alone)) < 1e-4
    adamw = train(tmp_path / "adamw", 4, speedups=[])  # what the two comparisons can tell apart
    assert largest(abs(a - b) for a, b in zip(losses(adamw), losses(alone))) > 1e-4
    assert largest_difference(weights(adamw), weights(alone)) > 5e-4


@pytest.mark.nightly
def test_matrices_that_fsdp2_shards_are_stepped_as_whole_ones_and_resume_bit_for_bit(tmp_path):
    run_on_ranks(HELPERS / "muon_sharded_on_ranks.py", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kind"] == "DistributedType.FSDP"
    whole = load_file(tmp_path / "whole.safetensors")
    assert largest_difference(whole, load_file(tmp_path / "resumed.safetensors")) == 0.0

    alone = muon_sharded_on_ranks.train(tmp_path / "alone", 8)
    assert len(report["losses"]) == 20
    assert largest(abs(a - b) for a, b in zip(losses(alone), report["losses"])) < 1e-4
    assert largest_difference(whole, weights(alone)) < 1e-4
    assert largest_difference(whole, dict(make_model().named_parameters())) > 5e-4
