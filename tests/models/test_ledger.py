"""The ledger counts what torch allocates, each storage once, for as long as it lives: hand-computed."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ext.models.ledger import GRADIENTS, OTHER, WEIGHTS, Ledger, rounded_bytes


def test_bytes_are_rounded_up_to_the_allocators_blocks():
    assert [rounded_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


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


def test_fake_tensors_give_the_same_levels_as_real_ones():
    def levels():
        layer = nn.Linear(64, 64)
        inputs = torch.ones(32, 64)
        with Ledger() as ledger:
            ledger.know(layer.parameters())
            torch.relu(layer(inputs)).sum().backward()
        return ledger.peak, ledger.total

    real = levels()
    with FakeTensorMode():
        assert levels() == real


def test_tensors_whose_size_the_rows_divide_grow_with_them():
    with Ledger(rows=7) as ledger:
        rows, fixed = torch.zeros(7, 128), torch.zeros(128)
    assert ledger.levels[-1] == (7 * 512 + 512, 7 * 512, 0)
    assert rows.numel() == 7 * fixed.numel()


class IgnoresFrees(Ledger):
    def _free(self, key):
        pass


class CountsViewsTwice(Ledger):
    def _add(self, tensor, category=OTHER):
        self.current[category] += rounded_bytes(tensor.untyped_storage().nbytes())


def test_broken_twins_are_found_out():
    forgetful, double = IgnoresFrees(), CountsViewsTwice()
    let_go(forgetful)
    kept = use_views(double)
    assert forgetful.total > 512
    assert double.total > kept[0].nbytes
