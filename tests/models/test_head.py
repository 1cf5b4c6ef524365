import pytest
import torch
from torch import nn

from hf_ext.models.head import RegressionHead


@pytest.fixture
def head():
    torch.manual_seed(0)
    return RegressionHead(4, [8, 6], dropout=0.5).eval()


EMBEDDINGS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [100.3, -50.7, 0.01, 7.0]])


def test_layers_are_linear_gelu_dropout_and_a_norm_between_hidden_layers(head):
    kinds = [type(layer) for layer in head.layers]
    block = [nn.Linear, nn.GELU, nn.Dropout]
    assert kinds == [*block, nn.LayerNorm, *block, nn.Linear]
    assert [tuple(layer.weight.shape) for layer in head.layers if isinstance(layer, nn.Linear)] == [
        (8, 4),
        (6, 8),
        (1, 6),
    ]
    assert [type(layer) for layer in RegressionHead(4, [], 0.5).layers] == [nn.Linear]


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


def test_features_are_centred_and_divided_by_their_spread():
    head = linear_head([2.0, -1.0], [4.0, 0.5])
    assert head(torch.tensor([[6.0, 1.0]])).item() == pytest.approx((6 - 2) / 4 + (1 + 1) / 0.5)


@pytest.mark.parametrize(("mean", "std"), [(3.0, 0.0), (3.0, 1e-9), (1000.0, 5e-4)])
def test_a_constant_feature_is_centred_and_not_scaled_up(mean, std):
    head = linear_head([mean], [std])
    assert head.input_scale.tolist() == [1.0]
    assert head(torch.tensor([[mean + 0.25]])).item() == pytest.approx(0.25)


def test_scaling_is_saved_with_the_weights(head):
    head.fit_scaling(torch.full((4,), 2.0), torch.full((4,), 4.0))
    again = RegressionHead(4, [8, 6], dropout=0.5).eval()
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(EMBEDDINGS), head(EMBEDDINGS))
    assert again.input_scale.tolist() == [0.25] * 4
