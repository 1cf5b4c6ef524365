"""Formulas of several devices against sums worked out by hand."""

import dataclasses

import pytest
import scaling

MILLION = scaling.Shape(num_parameters=10**6, num_trainable=10**6, num_layers=10)
ADAPTED = scaling.Shape(num_parameters=10**6, num_trainable=10**4, num_layers=10)


def layout(strategy: str, n: int, half: bool = True, offload: bool = False, group: int | None = None):
    return scaling.Layout(strategy, n, group or n, half, offload)


@pytest.mark.parametrize(
    ("wanted", "shape", "expected"),
    [
        (layout("one process", 1), MILLION, 18e6),  # 4 + 4 + 8 and 2 of the cast weight
        (layout("one process", 1, half=False), MILLION, 16e6),
        (layout("DDP", 4), MILLION, 22e6),  # and 4 of the buckets
        (layout("DDP", 4), ADAPTED, 4e6 + 12e4 + 2e4 + 4e4),
        (layout("DDP", 4), dataclasses.replace(ADAPTED, num_base=900_000), 4e6 - 2 * 9e5 + 12e4 + 2e4 + 4e4),
        (layout("FSDP2", 4), MILLION, 4e6 + (3 * 2 + 4) * 1e5),
        (layout("FSDP2", 4), ADAPTED, 1e6 + 3e4 + (3 * 2 + 4) * 1e5),
        (layout("ZeRO-2", 4), MILLION, 2e6 + 18e6 / 4),
        (layout("ZeRO-3", 4), MILLION, 18e6 / 4 + 2e6 + 2 * 2 * 1e5),
        (layout("ZeRO-3", 4, offload=True), MILLION, 2e6 + 2 * 2 * 1e5),
    ],
)
def test_bytes_of_states_are_those_worked_out_by_hand(wanted, shape, expected):
    assert scaling.state_bytes(wanted, shape) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wanted", "shape", "passes", "expected"),
    [
        (layout("one process", 1), MILLION, 1, 0),
        (layout("DDP", 2), MILLION, 1, 4e6),  # 2 x 1/2 x 4
        (layout("DDP", 2), MILLION, 8, 4e6),  # once per optimizer step
        (layout("DDP", 4), ADAPTED, 1, 6e4),  # 2 x 3/4 x 4, of the adapters alone
        (layout("FSDP2", 4), MILLION, 1, 6e6),  # 2 x 3/4 x 2 and 3/4 x 4
        (layout("FSDP2", 4), MILLION, 8, 48e6),  # with every pass
        (layout("FSDP2", 4), ADAPTED, 1, 3e6 + 3e4),
        (layout("ZeRO-2", 4), MILLION, 1, 3e6),
        (layout("ZeRO-2", 4), MILLION, 8, 13.5e6),  # gradients with every pass, weights once: 9 x 3/4 x 2
        (layout("ZeRO-3", 4), MILLION, 1, 4.5e6),
        (layout("HSDP", 8, group=4), MILLION, 1, 7e6),  # 2 x 3/4 x 2, 3/4 x 4 and 2 x 1/2 x 4 / 4
    ],
)
def test_bytes_sent_are_those_worked_out_by_hand(wanted, shape, passes, expected):
    assert scaling.sent_bytes(scaling.transfers(wanted, shape), passes) == pytest.approx(expected)


def test_a_broken_ring_factor_would_be_seen():
    class Tree(scaling.Transfer):
        factor = 2.0

    (right,) = scaling.transfers(layout("DDP", 4), MILLION)
    assert right.sent_bytes == 6e6
    assert Tree(**dataclasses.asdict(right)).sent_bytes == 8e6
