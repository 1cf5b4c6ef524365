import pytest
import torch

from hf_ext.models.losses import regression_loss

# -log Phi(1), -log Phi(-1); log(1 + exp(-1)), log(1 + exp(-2)), log(1 + exp(-3)), log(1 + exp(1))
NLL_PLUS, NLL_MINUS = 0.17275378, 1.84102165
SOFT_1, SOFT_2, SOFT_3, SOFT_PLUS_1 = 0.31326169, 0.12692801, 0.04858735, 1.31326169


def loss(name, predictions, labels, bounds=None, **kwargs):
    bounds = None if bounds is None else torch.tensor(bounds)
    return regression_loss(name, torch.tensor(predictions), torch.tensor(labels), bounds, **kwargs).item()


@pytest.mark.parametrize(
    ("name", "kwargs", "value"),
    [("mse", {}, 5.0), ("huber", {}, 2.0), ("huber", {"huber_delta": 2.0}, 2.5), ("tobit", {}, 2.5)],
)
def test_sums_over_exact_rows_are_those_worked_out_by_hand(name, kwargs, value):
    assert loss(name, [1.0, 2.0], [0.0, 4.0], **kwargs) == pytest.approx(value)


@pytest.mark.parametrize(
    ("bound", "prediction", "value"),
    [(0, 0.0, 0.125), (-1, 0.0, 0.25 * NLL_PLUS), (1, 0.0, 0.25 * NLL_MINUS), (1, 1.0, 0.25 * NLL_PLUS)],
)
def test_tobit_of_a_censored_row_is_the_probability_of_its_tail(bound, prediction, value):
    assert loss("tobit", [prediction], [0.5], [bound], tobit_scale=0.5) == pytest.approx(value, rel=1e-5)


def censored_gradients(sign):
    """Gradients for predictions below, above, below and above label 0; the first two known as upper bounds."""
    predictions = torch.tensor([-3.0, 1.0, -1.0, 3.0], requires_grad=True)
    bounds = sign * torch.tensor([-1, -1, 1, 1])
    regression_loss("tobit", predictions, torch.zeros(4), bounds, tobit_scale=0.5).backward()
    return predictions.grad.tolist()


def assert_only_violated_bounds_pull(gradients):
    below, above, too_low, fine = gradients
    assert below == pytest.approx(0.0, abs=1e-6)
    assert above > 0.5
    assert too_low < -0.5
    assert fine == pytest.approx(0.0, abs=1e-6)


def test_tobit_pulls_a_prediction_only_where_it_violates_its_bound():
    assert_only_violated_bounds_pull(censored_gradients(1))


def test_tobit_with_the_sign_of_the_bounds_flipped_is_told_apart():
    with pytest.raises(AssertionError):
        assert_only_violated_bounds_pull(censored_gradients(-1))


def test_tobit_stays_finite_far_out_in_the_tail():
    predictions = torch.tensor([-40.0], requires_grad=True)
    value = regression_loss("tobit", predictions, torch.zeros(1), torch.tensor([1]), tobit_scale=0.25)
    value.backward()
    assert value.item() == pytest.approx(0.5 * 40**2, rel=0.01)
    assert predictions.grad.item() == pytest.approx(-40.0, rel=0.01)


@pytest.mark.parametrize(
    ("predictions", "labels", "bounds", "value"),
    [
        ([2.0, 1.0], [1.0, 0.0], None, SOFT_1),
        ([1.0, 2.0], [1.0, 0.0], None, SOFT_PLUS_1),
        ([2.0, 1.0], [1.0, 1.0], None, 0.0),
        ([2.0, 1.0], [1.0, 0.0], [-1, 0], 0.0),
        ([2.0, 1.0], [1.0, 0.0], [0, 1], 0.0),
        ([2.0, 1.0], [1.0, 0.0], [1, 0], SOFT_1),
        ([2.0, 1.0], [1.0, 0.0], [1, -1], SOFT_1),
        # The rows' mean losses are (s1 + s3) / 2, (s1 + s2) / 2 and (s3 + s2) / 2, and half their sum counts.
        ([0.0, 1.0, 3.0], [0.0, 1.0, 2.0], None, (SOFT_1 + SOFT_2 + SOFT_3) / 2),
    ],
)
def test_ranking_loss_is_that_of_the_pairs_whose_order_is_known(predictions, labels, bounds, value):
    assert loss("ranking", predictions, labels, bounds) == pytest.approx(value, abs=1e-6)


def whole_and_split(name):
    generator = torch.Generator().manual_seed(0)
    predictions, labels = torch.randn(2, 16, generator=generator)
    bounds = torch.randint(-1, 2, (16,), generator=generator)
    whole = regression_loss(name, predictions, labels, bounds)
    parts = zip(predictions.split([4, 10, 2]), labels.split([4, 10, 2]), bounds.split([4, 10, 2]))
    return whole, sum(regression_loss(name, *part) for part in parts)


@pytest.mark.parametrize("name", ["mse", "huber", "tobit"])
def test_losses_of_the_parts_of_a_batch_add_up_to_that_of_the_whole(name):
    torch.testing.assert_close(*whole_and_split(name), rtol=1e-6, atol=1e-6)


def test_a_loss_that_compares_rows_does_not_add_up():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*whole_and_split("ranking"), rtol=1e-6, atol=1e-6)
