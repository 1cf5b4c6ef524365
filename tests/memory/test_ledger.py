"""The ledger counts what torch allocates, each storage once, for as long as it lives: hand-computed."""

import torch
from torch import nn

from hf_ext.memory.probe import GRADIENTS, OTHER, WEIGHTS, Ledger


def test_a_linear_layer_takes_its_output():
    layer, inputs = nn.Linear(100, 200), torch.zeros(64, 100)
    with Ledger() as ledger, torch.no_grad():
        ledger.know(layer.parameters())
        ledger.know([inputs], OTHER)
        output = layer(inputs)
    # Weight 100 x 200 x 4 = 80,000 -> 80,384; bias 800 -> 1,024; inputs 64 x 100 x 4 = 25,600; output 64 x 200 x 4.
    assert ledger.current[WEIGHTS] == 80_384 + 1_024
    assert ledger.current[OTHER] == 25_600 + 51_200
    assert ledger.peak == 81_408 + 76_800
    assert output.shape == (64, 200)


def use_views(ledger):
    base = torch.zeros(256)  # 1,024 bytes
    with ledger:
        ledger.know([base], OTHER)
        views = [base.view(16, 16), base[3:], base.view(16, 16).t(), base.expand(4, 256)]
        base.add_(1)
    return base, views


def test_views_and_changes_in_place_take_nothing():
    ledger = Ledger()
    base, views = use_views(ledger)
    assert (len(views), ledger.total, ledger.peak) == (4, 1024, 1024)
    del base, views
    assert ledger.total == 0


def let_go(ledger):
    start = torch.zeros(128)  # 512 bytes each
    with ledger:
        for _ in range(10):
            start = start + 1
    return start


def test_what_is_let_go_is_not_counted_any_more():
    ledger = Ledger()
    last = let_go(ledger)
    # The new one, made while the one before was there; the first was made before the ledger, and is not known to it.
    assert (last.nbytes, ledger.total, ledger.peak) == (512, 512, 1024)


def test_what_autograd_keeps_counts_until_the_backward_pass():
    weight = nn.Parameter(torch.zeros(128))
    with Ledger() as ledger:
        ledger.know([weight])
        loss = (weight.exp() * 2).sum()  # keeps the exponential, not the product
        kept = ledger.current[OTHER]
        loss.backward()
        ledger.know([weight.grad], GRADIENTS)
        del loss
    assert kept == 512 + 512  # the exponential, and the loss
    assert ledger.current == {WEIGHTS: 512, GRADIENTS: 512, OTHER: 0}
