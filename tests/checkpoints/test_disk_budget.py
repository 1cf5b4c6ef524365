"""Whether a budget holds a run's checkpoints, and how they are made smaller."""

import pytest

from hf_ext.checkpoints.budget import GB, STEPS, Sizes, check_budget, choose_degradation, needed_bytes
from hf_ext.checkpoints.retention import Policy
from hf_ext.errors import ArgumentError

# A 650 M model in float32 with AdamW: 2.6 GB of weights, twice that of optimizer state.
LARGE = Sizes(weights=2_600_000_000, optimizer=5_200_000_000, other=1_000_000)


def policy(budget_gb: float | None, **settings) -> Policy:
    budget_bytes = None if budget_gb is None else round(budget_gb * GB)
    return Policy(**{"limit": None, "keep_best": True, "budget_bytes": budget_bytes, **settings})


def test_a_run_needs_the_new_checkpoint_the_latest_and_what_was_asked_for():
    sizes = Sizes(weights=30, optimizer=60, other=10)
    assert needed_bytes(sizes, Policy(1, keep_best=False), 7) == 207
    assert needed_bytes(sizes, Policy(3, keep_best=False), 7) == 207  # a backup takes what room is left
    assert needed_bytes(sizes, Policy(1, keep_best=True), 7) == 307
    assert needed_bytes(sizes, Policy(3, keep_best=True, keep_epoch=True), 7) == 407
    assert needed_bytes(sizes, Policy(1, keep_best=True, best_weights_only=True), 7) == 247
    newest_only = Policy(3, keep_best=True, keep_epoch=True, optimizer_in_newest_only=True)
    assert needed_bytes(sizes, newest_only, 7) == 287


def test_a_budget_that_holds_everything_passes():
    assert check_budget(LARGE, policy(None), 0) == 23_403_000_000
    assert check_budget(LARGE, policy(23.403), 0) == 23_403_000_000


def test_a_budget_too_small_is_refused_with_the_arithmetic():
    with pytest.raises(ArgumentError) as refusal:
        check_budget(LARGE, policy(20), other_bytes=500_000_000)
    assert str(refusal.value) == (
        "save_total_size_gb=20 cannot hold this run's checkpoints (each: weights 2.600000, optimizer 5.200000, "
        "other 0.001000 GB):\n"
        "  all other files of the run                            0.500000 GB\n"
        "  checkpoint being written                              7.801000 GB\n"
        "  latest checkpoint, until the new one is verified      7.801000 GB\n"
        "  best checkpoint                                       7.801000 GB\n"
        "  sum, at the moment of a save                         23.903000 GB\n"
        "  budget                                               20.000000 GB\n"
        "Smallest budget that works: --save_total_size_gb 23.903. --disk_policy degrade would need 18.703 GB:\n"
        f"  best_weights_only: {STEPS['best_weights_only']}"
    )


def test_the_printed_smallest_budget_works():
    for weights in (1, 999, 1_000, 123_456_789, 2_600_000_001):
        with pytest.raises(ArgumentError) as refusal:
            check_budget(Sizes(weights, 3, 5), Policy(1, True, budget_bytes=1), 0)
        printed = str(refusal.value).split("--save_total_size_gb ")[1].split(". ")[0]
        assert check_budget(Sizes(weights, 3, 5), policy(float(printed)), 0) > 0


@pytest.mark.parametrize(
    ("budget_gb", "steps", "needed"),
    [
        (31.204, (), 31_204_000_000),
        (30, ("best_weights_only",), 26_004_000_000),
        (25, ("best_weights_only", "optimizer_in_newest_only"), 20_804_000_000),
    ],
)
def test_checkpoints_degrade_step_by_step_until_they_fit(budget_gb, steps, needed):
    chosen = choose_degradation(LARGE, policy(budget_gb, keep_epoch=True), 0)
    assert (chosen.steps, chosen.needed_bytes) == (steps, needed)
    assert chosen.policy.best_weights_only == ("best_weights_only" in steps)
    assert chosen.policy.optimizer_in_newest_only == ("optimizer_in_newest_only" in steps)
    assert check_budget(LARGE, chosen.policy, 0) == needed


def test_steps_that_gain_nothing_are_not_taken():
    assert choose_degradation(LARGE, policy(18.203), 0).steps == ("best_weights_only",)
    assert choose_degradation(LARGE, policy(None), 0).steps == ()


def test_where_nothing_can_be_left_out_degrading_is_not_offered():
    with pytest.raises(ArgumentError, match="degrade would not make them smaller"):
        check_budget(Sizes(weights=100, optimizer=50, other=0), Policy(1, keep_best=False, budget_bytes=299), 0)


def test_a_budget_too_small_for_every_step_is_refused_with_the_arithmetic_after_them():
    with pytest.raises(ArgumentError, match=r"degrade would need 18.203 GB, too much as well\.$"):
        check_budget(LARGE, policy(10), 0)
    with pytest.raises(ArgumentError) as refusal:
        choose_degradation(LARGE, policy(10), 0)
    text = str(refusal.value)
    assert "best checkpoint, weights only                         2.601000 GB\n" in text
    assert "--save_total_size_gb 18.203. These steps of --disk_policy degrade are counted in:\n" in text
    assert "best_weights_only: " in text


def test_a_small_head_beside_a_frozen_encoder_fits_where_the_whole_model_does_not():
    head = Sizes(weights=12_000_000, optimizer=24_000_000, other=200_000)
    assert check_budget(head, policy(0.2), 50_000_000) == 158_600_000
    with pytest.raises(ArgumentError):
        check_budget(LARGE, policy(0.2), 50_000_000)
