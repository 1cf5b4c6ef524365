"""A ridge beside a head: the weights of a row's partner, those of all rows where it has none, whatever the rounding."""

import pytest
import torch

from hf_ext.models.postprocess import StackedRidge

# Two features that vary, and two that tell partners apart.
PARTNERS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
WEIGHTS = torch.tensor([[1.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, -3.0, 0.0, 0.0]])
INTERCEPTS = torch.tensor([10.0, 20.0, 30.0])


@pytest.fixture
def ridge() -> StackedRidge:
    made = StackedRidge(4, [(2, 2)], num_partners=2)
    made.fill(WEIGHTS, INTERCEPTS, torch.cat([torch.ones(2, 2), PARTNERS], 1))
    return made


def rows(partners: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.tensor([[5.0, 7.0]]).expand(len(partners), 2), partners], 1)


def test_each_partner_has_weights_of_its_own_and_a_stranger_those_of_all(ridge):
    found = ridge(rows(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]])))
    assert found.tolist() == [20 + 2 * 5, 30 - 3 * 7, 10 + 5 + 7, 10 + 5 + 7]
    plain = StackedRidge(4)
    plain.fill(WEIGHTS[:1], INTERCEPTS[:1])
    assert plain(rows(PARTNERS)).tolist() == [22, 22]


def test_rounding_does_not_make_a_stranger_of_a_partner_but_a_tenth_of_their_distance_does(ridge):
    apart = 2**0.5
    near, far = (PARTNERS[:1] + torch.tensor([[0.0, share * apart]]) for share in (0.09, 0.11))
    assert ridge(rows(near)).tolist() == [30]
    assert ridge(rows(far)).tolist() == [22]
    # Partners far from the origin, where distances by a product of matrices would be off by more than they are apart.
    moved = StackedRidge(4, [(2, 2)], num_partners=2)
    moved.fill(WEIGHTS, INTERCEPTS, rows(1e3 + 0.1 * PARTNERS))
    many = rows(1e3 + 0.1 * PARTNERS.repeat(100, 1))
    assert moved(many).tolist() == [30, 9] * 100


def test_half_precision_around_it_does_not_reach_it(ridge):
    features = rows(PARTNERS) * torch.tensor([1.001, 1.001, 1.0, 1.0])
    for one in (ridge, StackedRidge(4)):
        with torch.autocast("cpu", torch.bfloat16):
            found = one(features)
        assert found.dtype == torch.float32
        assert torch.equal(found, one(features))


def test_what_was_fitted_goes_with_a_state_dict(ridge):
    copy = StackedRidge(4, [(2, 2)], num_partners=2)
    copy.load_state_dict(ridge.state_dict())
    features = rows(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    assert torch.equal(copy(features), ridge(features))
    assert not [*ridge.parameters()]
