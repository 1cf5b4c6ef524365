"""An input that a row lacks is exact zeros for the head, whatever stands in its place, and no encoder sees it."""

import pytest
import torch
from tiny_affinity import ROWS, make_batch, make_model, shift

from hf_ext.errors import ArgumentError
from hf_ext.models.head import HEADS

COLUMNS = ["heavy", "light"]
LACKING = [ROWS[0], {**ROWS[1], "light": ""}, ROWS[2], {**ROWS[3], "light": ""}]
NONE = [{**row, "light": ""} for row in ROWS]
MISSING = torch.tensor([False, True, False, True])


@pytest.fixture
def make(demo_encoders):
    """A model of heavy and light, whose scales were measured on rows of its own; `settings` as in `make_model`."""

    def build(**settings):
        model = make_model([demo_encoders[1]], inputs=[[["heavy"], ["light"]]], **settings)
        generator = torch.Generator().manual_seed(1)
        embeddings = {
            name: 3 + torch.randn(8, width, generator=generator) for name, width in model.embedding_sizes.items()
        }
        model.fit_scaling(7.0, 1.0, embeddings)
        return model.eval()

    return build


def collate(model, rows):
    return make_batch(model, rows, sequence_columns=COLUMNS, missing_chains=["light"])


def look_into(model):
    """What the layers of each head get, noted at every call."""
    seen = []
    heads = [model.head] if hasattr(model.head, "layers") else list(model.head.members)
    for head in heads:
        head.layers.register_forward_hook(lambda layers, given, output: seen.append(given[0].detach()))
    return seen


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_layers_of_every_head_get_exact_zeros(make, form, size):
    model = make(head_form=form, ensemble_size=size)
    if size == 2:  # each with scales of its own
        model.head.members[1].input_mean.add_(0.37)
    seen = look_into(model)
    model(**collate(model, LACKING))
    assert len(seen) == size
    width = model.embedding_sizes["heavy"]
    for features in seen:
        assert torch.all(features[MISSING, width:] == 0)
        assert torch.all(features[~MISSING, width:] != 0)
        assert torch.all(features[:, :width] != 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_nothing_leaks_from_what_stands_in_the_place_of_a_missing_input(make, value):
    model = make()
    batch = collate(model, LACKING)
    labels = batch["labels"]
    clean = {name: torch.randn(4, width) for name, width in model.embedding_sizes.items()}
    dirty = {**clean, "light": torch.where(MISSING[:, None], value, clean["light"])}

    def run(embeddings, missing):
        embeddings = {name: x.clone().requires_grad_() for name, x in embeddings.items()}
        model.zero_grad()
        output = model(embeddings=embeddings, missing=missing, labels=labels)
        output.loss.backward()
        weights = [parameter.grad.clone() for parameter in model.head.parameters()]
        return [output.logits, output.loss, *weights, *(x.grad for x in embeddings.values())]

    expected, found = (run(given, {"light": MISSING}) for given in (clean, dirty))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(torch.isfinite(x).all() for x in found)
    assert torch.all(found[-1][MISSING] == 0)
    assert not all(torch.equal(a, b) for a, b in zip(expected, run(dirty, {})))  # the mask is what keeps it out


def test_a_name_in_missing_that_is_no_input_is_refused(make):
    model = make()
    embeddings = {name: torch.zeros(4, width) for name, width in model.embedding_sizes.items()}
    with pytest.raises(ArgumentError, match=r"missing names \['lihgt'\]; this model reads \['heavy', 'light'\]"):
        model(embeddings=embeddings, missing={"lihgt": MISSING})


def test_a_missing_input_does_not_reach_the_encoder(make):
    model = make()
    rows = []
    model.attach_encoders()
    model.encoders["0"].register_forward_pre_hook(
        lambda encoder, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    model(**collate(model, LACKING))
    assert rows == [4, 2]  # heavy, light


def test_a_stacked_ridge_sees_the_mean_in_their_place(make):
    model = make()
    width = model.embedding_sizes["heavy"]
    weights = torch.linspace(-1, 1, 2 * width)
    stack = {"kind": "line", "intercept": 0.0, "slope": 0.0, "ridge": 1.0}
    embeddings = {name: torch.randn(4, width) for name in COLUMNS}
    ridge = model.new_ridge()
    ridge.fill(weights[None], torch.zeros(1))
    model.set_calibration(stack, ridge)
    with torch.no_grad():
        found = model(embeddings=embeddings, missing={"light": MISSING}).logits
    features = torch.cat([embeddings["heavy"], embeddings["light"]], 1)
    features[MISSING, width:] = model.head.input_mean[width:]
    torch.testing.assert_close(found, features @ weights)
    torch.testing.assert_close(model.fill_of("light"), model.head.input_mean[width:])


@pytest.mark.parametrize("training", ["lora", "full"])
def test_encoders_learn_from_the_rows_that_have_the_input_alone(make, training):
    model = make(training=training)
    shift(model, "lora_" if training == "lora" else "encoder")

    def gradients(rows):
        model.zero_grad()
        model(**collate(model, rows), num_items_in_batch=4).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and "encoders" in n}

    both = gradients([LACKING[0], LACKING[1]])
    heavy = torch.tensor(0.0)
    apart = [gradients([row]) for row in LACKING[:2]]
    assert both.keys() == apart[0].keys() == apart[1].keys()
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, apart[0][name] + apart[1][name], rtol=1e-4, atol=1e-6)
        heavy = max(heavy, apart[1][name].abs().max())
    assert heavy > 0


def test_a_batch_in_which_no_row_has_it_gives_every_weight_of_its_tower_a_gradient_of_zero(demo_encoders):
    model = make_model([demo_encoders[1], demo_encoders[0]], "lora", inputs=[[["heavy"]], [["light"]]])
    shift(model, "lora_")
    model(**collate(model, NONE)).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name.startswith("encoders")}
    assert all(parameter.grad is not None for parameter in trained.values())  # DDP waits for each
    light = [p.grad for name, p in trained.items() if name.startswith("encoders.1.")]
    heavy = [p.grad for name, p in trained.items() if name.startswith("encoders.0.")]
    assert light
    assert all(torch.all(gradient == 0) for gradient in light)
    assert any(torch.any(gradient != 0) for gradient in heavy)
