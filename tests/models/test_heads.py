"""What stands on an encoder, worked out by hand: pooling, the head, a ridge beside it, and the losses of labels."""

import pytest
import torch
from tiny_affinity import make_batch, make_model, predict, shift
from torch import nn

from hf_ext.errors import ArgumentError
from hf_ext.models import POOLINGS, AffinityModel, Pooling
from hf_ext.models.head import RegressionHead
from hf_ext.models.regression_losses import regression_loss

pytestmark = pytest.mark.internals

# Two rows of four tokens, two wide: special, residues, special or padding.
STATES = torch.tensor(
    [[[9.0, 9.0], [1.0, -5.0], [3.0, -1.0], [9.0, 9.0]], [[7.0, 8.0], [2.0, 4.0], [50.0, 50.0], [60.0, 60.0]]]
)
RESIDUES = torch.tensor([[False, True, True, False], [False, True, False, False]])
TOKENS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])  # the last token of the second row is padding
MASKS = {"residue_mask": RESIDUES, "attention_mask": TOKENS}


def all_residues(num_tokens):
    return {"residue_mask": torch.ones(1, num_tokens, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("method", "values", "ignores"),
    [
        ("mean", [[2.0, -3.0], [2.0, 4.0]], True),
        ("mean_tokens", [[5.5, 3.0], [59 / 3, 62 / 3]], False),
        ("max", [[3.0, -1.0], [2.0, 4.0]], True),
        ("cls", [[9.0, 9.0], [7.0, 8.0]], False),
    ],
)
def test_pooled_values_are_those_worked_out_by_hand_and_read_no_padding(method, values, ignores):
    pool = POOLINGS[method](2)
    found = pool(STATES, MASKS)
    torch.testing.assert_close(found, torch.tensor(values))
    assert torch.equal(pool(STATES.masked_fill(~TOKENS.bool()[..., None], 1e4), MASKS), found)
    assert torch.equal(pool(STATES.masked_fill(~RESIDUES[..., None], 1e4), MASKS), found) is ignores


@pytest.mark.parametrize("method", ["mean", "max", "cls"])
def test_pooling_is_float32_also_for_half_precision_states_and_under_autocast(method):
    states = torch.full((1, 40, 2), 100.0) + torch.arange(40.0)[None, :, None] / 64
    mask = all_residues(40)
    pool = POOLINGS[method](2)
    expected = pool(states, mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pool(states, mask), expected)
        assert pool(states.bfloat16(), mask).dtype == torch.float32


class Attentive(Pooling):
    """A toy with weights of its own."""

    def __init__(self, width):
        super().__init__(width)
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, states, batch):
        scores = (states.float() @ self.query).masked_fill(~batch["residue_mask"], float("-inf"))
        return torch.einsum("nt,ntw->nw", scores.softmax(1), states.float())


def test_a_pooling_of_one_class_and_one_entry_trains_and_is_saved_with_the_model(demo_encoders, tmp_path, monkeypatch):
    monkeypatch.setitem(POOLINGS, "attentive", Attentive)
    with pytest.raises(ArgumentError, match=r"pooling='attentive' has weights, .*Train the encoder"):
        make_model([demo_encoders[1]], pooling="attentive")
    model = make_model([demo_encoders[1]], training="full", pooling="attentive")
    batch = make_batch(model)
    model(**batch).loss.backward()
    query = model.pooling_of("heavy").query
    assert query.grad.norm() > 0
    assert shift(model, "poolings.") == 1
    model.save_pretrained(tmp_path)
    loaded = AffinityModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.pooling_of("heavy").query, query)
    assert torch.equal(predict(loaded, batch), predict(model, batch))


@pytest.fixture
def head():
    torch.manual_seed(0)
    return RegressionHead(4, [8, 6], dropout=0.5).eval()


EMBEDDINGS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [100.3, -50.7, 0.01, 7.0]])


def test_output_is_the_same_float32_number_under_autocast(head):
    expected = head(EMBEDDINGS)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(EMBEDDINGS)
        rounded = head.layers(EMBEDDINGS).squeeze(-1)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert rounded.dtype == torch.bfloat16  # what a head without the guard would give
    assert not torch.equal(rounded.float(), expected)


def linear_head(mean, std):
    head = RegressionHead(len(mean), [], 0.0)
    nn.init.ones_(head.layers[0].weight)
    nn.init.zeros_(head.layers[0].bias)
    head.fit_scaling(torch.tensor(mean), torch.tensor(std))
    return head


def test_features_are_centred_and_divided_by_their_spread_unless_they_are_constant():
    scaled = linear_head([2.0, -1.0], [4.0, 0.5])
    assert scaled(torch.tensor([[6.0, 1.0]])).item() == pytest.approx((6 - 2) / 4 + (1 + 1) / 0.5)
    for mean, std in ((3.0, 0.0), (3.0, 1e-9), (1000.0, 5e-4)):
        constant = linear_head([mean], [std])
        assert constant.input_scale.tolist() == [1.0]
        assert constant(torch.tensor([[mean + 0.25]])).item() == pytest.approx(0.25)


# -log Phi(1), -log Phi(-1); log(1 + exp(-1)), log(1 + exp(-2)), log(1 + exp(-3)), log(1 + exp(1))
NLL_PLUS, NLL_MINUS = 0.17275378, 1.84102165
SOFT_1, SOFT_2, SOFT_3, SOFT_PLUS_1 = 0.31326169, 0.12692801, 0.04858735, 1.31326169


def loss(name, predictions, labels, bounds=None, **kwargs):
    bounds = None if bounds is None else torch.tensor(bounds)
    return regression_loss(name, torch.tensor(predictions), torch.tensor(labels), bounds, **kwargs).sum().item()


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


def test_tobit_pulls_a_prediction_only_where_it_violates_its_bound():
    """Predictions below, above, below and above label 0; the first two known as upper bounds."""

    def gradients(sign):
        predictions = torch.tensor([-3.0, 1.0, -1.0, 3.0], requires_grad=True)
        bounds = sign * torch.tensor([-1, -1, 1, 1])
        regression_loss("tobit", predictions, torch.zeros(4), bounds, tobit_scale=0.5).sum().backward()
        return predictions.grad

    below, above, too_low, fine = gradients(1)
    assert max(below.abs(), fine.abs()) < 1e-6
    assert above > 0.5
    assert too_low < -0.5
    assert gradients(-1)[[0, 3]].abs().min() > 0.5  # bounds of the other sign are told apart


def test_tobit_stays_finite_far_out_in_the_tail():
    predictions = torch.tensor([-40.0], requires_grad=True)
    value = regression_loss("tobit", predictions, torch.zeros(1), torch.tensor([1]), tobit_scale=0.25)
    value.backward()
    assert value.item() == pytest.approx(0.5 * 40**2, rel=0.01)
    assert predictions.grad.item() == pytest.approx(-40.0, rel=0.01)


@pytest.mark.parametrize("name", ["mse", "huber", "tobit", "ranking"])
def test_losses_of_the_parts_of_a_batch_add_up_unless_rows_are_compared(name):
    generator = torch.Generator().manual_seed(0)
    predictions, labels = torch.randn(2, 16, generator=generator)
    bounds = torch.randint(-1, 2, (16,), generator=generator)
    whole = regression_loss(name, predictions, labels, bounds).sum()
    parts = zip(predictions.split([4, 10, 2]), labels.split([4, 10, 2]), bounds.split([4, 10, 2]))
    added = sum(regression_loss(name, *part).sum() for part in parts)
    assert torch.allclose(whole, added, rtol=1e-6, atol=1e-6) is (name != "ranking")


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
