"""AffinityModel: towers, what trains, precision, units, effective batches; an input that a row lacks is exact zeros."""

import pytest
import torch
from tiny_affinity import ROWS, make_batch, make_model, predict, shift
from tiny_t5 import write_t5_encoder

from hf_ext.errors import ArgumentError
from hf_ext.models.head import HEADS

pytestmark = pytest.mark.internals


@pytest.fixture(scope="module")
def folders(demo_encoders, tmp_path_factory):
    return {**dict(zip(("bert", "esm"), demo_encoders)), "t5": write_t5_encoder(tmp_path_factory.mktemp("t5"))}


@pytest.fixture(scope="module")
def all_three(folders):
    return [folders[name] for name in ("bert", "t5", "esm")]


PAIR = [[["heavy", "light"]], [["antigen"]]]


@pytest.mark.parametrize(
    ("families", "inputs", "sizes"),
    [
        (["esm"], None, {"heavy": 64}),
        (["esm"], [[["heavy"], ["light"], ["antigen"]]], {"heavy": 64, "light": 64, "antigen": 64}),
        (["bert", "esm"], PAIR, {"heavy+light": 64, "antigen": 64}),
        (["t5", "esm"], PAIR, {"heavy+light": 32, "antigen": 64}),
        (["esm", "esm"], PAIR, {"heavy+light": 64, "antigen": 64}),
        (["bert", "t5", "esm"], None, {"heavy": 64, "light": 32, "antigen": 64}),
    ],
)
def test_one_to_three_towers_give_one_finite_number_per_row(folders, families, inputs, sizes):
    model = make_model([folders[name] for name in families], inputs=inputs)
    assert model.embedding_sizes == sizes
    assert model.frozen_inputs == list(sizes)
    assert model.head.layers[0].in_features == sum(sizes.values())
    logits = predict(model, make_batch(model))
    assert logits.shape == (4,)
    assert logits.dtype == torch.float32
    assert len(set(logits.tolist())) == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_a_batch_gives_what_its_rows_give_one_by_one(all_three, pooling):
    model = make_model(all_three, pooling=pooling)
    one_by_one = torch.cat([predict(model, make_batch(model, [row])) for row in ROWS])
    batch = make_batch(model)
    torch.testing.assert_close(predict(model, batch), one_by_one, rtol=0, atol=1e-6)
    for tensors in batch["sequences"].values():
        tensors["attention_mask"].fill_(1)
    assert (predict(model, batch) - one_by_one).abs().max() > 1e-6  # attention to padding is told apart


def test_sequences_embeddings_and_a_mixture_give_the_same_logits(all_three):
    model = make_model(all_three).eval()
    batch = make_batch(model)
    expected = predict(model, batch)
    embeddings = {name: model.encode(name, tensors) for name, tensors in batch["sequences"].items()}
    rest = {name: batch["sequences"][name] for name in ("heavy", "light")}
    assert torch.equal(predict(model, {"embeddings": embeddings}), expected)
    mixed = {"sequences": rest, "embeddings": {"antigen": embeddings["antigen"]}}
    assert torch.equal(predict(model, mixed), expected)
    mixed["embeddings"]["antigen"] = embeddings["antigen"].flip(0)
    assert not torch.equal(predict(model, mixed), expected)  # another row's antigen is told apart


def test_frozen_towers_stay_in_evaluation_mode_and_get_no_gradient(folders):
    model = make_model([folders["bert"]]).train()
    batch = make_batch(model)
    first = model(**batch)
    assert not model.encoders["0"].training
    assert not model.train().encoders["0"].training
    assert torch.equal(model(**batch).logits, first.logits)  # no dropout
    first.loss.backward()
    assert all(parameter.grad is None for parameter in model.encoders.parameters())
    assert all(parameter.grad is not None for parameter in model.head.parameters())


@pytest.mark.parametrize("training", ["full", "lora"])
def test_every_trainable_parameter_gets_a_gradient(all_three, training):
    """Otherwise DDP stops with unused parameters, and an optimizer's state cannot be resumed."""
    model = make_model(all_three, training)
    shift(model, "lora_B")
    model(**make_batch(model)).loss.backward()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert [name for name, parameter in trainable.items() if parameter.grad is None] == []
    assert not any("contact_head" in name for name in trainable)
    if training == "lora":
        assert all(name.startswith("head.") or "lora_" in name for name in trainable)
        # Two layers each: 6 linear layers in BERT and ESM; q, k, v, o, wi_0, wi_1, wo in T5; two matrices per layer.
        adapters = [sum(f"encoders.{i}." in name for name in trainable) for i in range(3)]
        assert adapters == [2 * 6 * 2, 2 * 7 * 2, 2 * 6 * 2]


def test_training_towers_follow_the_trainers_autocast_and_frozen_ones_their_own(folders):
    for training, own, outer, expected in (
        ("full", None, True, torch.bfloat16),
        ("lora", None, True, torch.bfloat16),
        ("frozen", None, True, torch.float32),
        ("frozen", "bfloat16", False, torch.bfloat16),
        ("full", "bfloat16", False, torch.float32),
    ):
        model = make_model([folders["esm"]], training, encoder_autocast=own).eval()
        model.attach_encoders()
        dtypes = []
        query = model.encoders["0"].encoder.layer[0].attention.self.query
        query.register_forward_hook(lambda module, inputs, output, dtypes=dtypes: dtypes.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            embedding = model.encode("heavy", make_batch(model)["sequences"]["heavy"])
        assert (dtypes, embedding.dtype) == ([expected], torch.float32)


def test_predictions_are_in_label_units_and_the_loss_in_standard_deviations(folders):
    model = make_model([folders["esm"]], label_mean=7.0, label_std=2.0)
    torch.nn.init.zeros_(model.head.layers[-1].weight)
    torch.nn.init.constant_(model.head.layers[-1].bias, 0.5)
    output = model(**make_batch(model))
    assert output.logits.tolist() == [8.0] * 4
    # labels 7, 9.5, 6.25, 8 are 0, 1.25, -0.375, 0.5; distances from 0.5: 0.5, 0.75, 0.875, 0
    assert output.loss.item() == pytest.approx((0.25 + 0.5625 + 0.765625 + 0) / 4)


def test_scaling_is_measured_over_each_inputs_embeddings(folders):
    model = make_model([folders["bert"], folders["esm"]])
    embeddings = {"heavy": torch.full((3, 64), 2.0), "light": torch.tensor([[1.0], [3.0]]).expand(2, 64)}
    model.fit_scaling(6.5, 0.0, embeddings)
    assert (model.config.label_mean, model.config.label_std, model.config.is_scaled) == (6.5, 1.0, True)
    assert model.head.input_mean.tolist() == [2.0] * 128
    assert model.head.input_scale.tolist() == [1.0] * 128  # constant; spread 1
    model.fit_scaling(6.5, 0.5, {**embeddings, "light": torch.tensor([[1.0], [5.0]]).expand(2, 64)})
    assert (model.config.label_std, model.head.input_scale[64:].unique().item()) == (0.5, 0.5)


def gradients(model, rows, sizes, num_items):
    model.zero_grad()
    for part in torch.arange(len(rows)).split(sizes):
        batch = make_batch(model, [rows[i] for i in part])
        loss = model(**batch, num_items_in_batch=num_items).loss
        (loss if num_items else loss / len(sizes)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_difference(first, second):
    return ((first - second).abs().max() / second.abs().max()).item()


SIXTEEN = [{**row, "label": row["label"] + i / 4} for i in range(4) for row in ROWS]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("training", ["frozen", "full"])
@pytest.mark.parametrize("loss", ["mse", "tobit"])
def test_gradients_do_not_depend_on_how_an_effective_batch_is_split(folders, training, loss):
    model = make_model([folders["bert"], folders["esm"]], training, loss=loss).eval()
    whole = gradients(model, SIXTEEN, [16], 16)
    assert relative_difference(gradients(model, SIXTEEN, [4, 4, 4, 4], 16), whole) < 1e-5
    assert relative_difference(gradients(model, SIXTEEN, [10, 5, 1], 16), whole) < 1e-5
    assert relative_difference(gradients(model, SIXTEEN, [16], None), whole) < 1e-5
    # The mean of the means of unequal parts, which Trainer takes without num_items_in_batch, is told apart.
    assert relative_difference(gradients(model, SIXTEEN, [10, 5, 1], None), whole) > 1e-2


def test_an_input_given_neither_way_is_refused(folders):
    model = make_model([folders["bert"], folders["esm"]])
    batch = make_batch(model)
    del batch["sequences"]["light"]
    with pytest.raises(ArgumentError, match=r"No sequences or embeddings for \['light'\]; this model reads"):
        model(**batch)


COLUMNS = ["heavy", "light"]
LACKING = [ROWS[0], {**ROWS[1], "light": ""}, ROWS[2], {**ROWS[3], "light": ""}]
NONE = [{**row, "light": ""} for row in ROWS]
MISSING = torch.tensor([False, True, False, True])


@pytest.fixture
def build(demo_encoders):
    """A model of heavy and light, whose scales were measured on rows of its own; `settings` as in `make_model`."""

    def inner(**settings):
        model = make_model([demo_encoders[1]], inputs=[[["heavy"], ["light"]]], **settings)
        generator = torch.Generator().manual_seed(1)
        embeddings = {
            name: 3 + torch.randn(8, width, generator=generator) for name, width in model.embedding_sizes.items()
        }
        model.fit_scaling(7.0, 1.0, embeddings)
        return model.eval()

    return inner


def collate(model, rows):
    return make_batch(model, rows, sequence_columns=COLUMNS, missing_chains=["light"])


@pytest.mark.parametrize("form", [form for form in HEADS if form != "likelihood"])
def test_nothing_leaks_from_what_stands_in_the_place_of_a_missing_input(build, form):
    model = build(head_form=form)
    labels = torch.tensor([row["label"] for row in LACKING])
    clean = {name: torch.randn(4, width) for name, width in model.embedding_sizes.items()}

    def run(embeddings, missing):
        embeddings = {name: x.clone().requires_grad_() for name, x in embeddings.items()}
        model.zero_grad()
        output = model(embeddings=embeddings, missing=missing, labels=labels)
        output.loss.backward()
        weights = [parameter.grad.clone() for parameter in model.head.parameters()]
        return [output.logits, output.loss, *weights, *(x.grad for x in embeddings.values())]

    expected = run(clean, {"light": MISSING})
    for value in (float("nan"), float("inf"), 1e30):
        dirty = {**clean, "light": torch.where(MISSING[:, None], value, clean["light"])}
        found = run(dirty, {"light": MISSING})
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.all(found[-1][MISSING] == 0)
        assert not all(torch.equal(a, b) for a, b in zip(expected, run(dirty, {})))  # the mask is what keeps it out


def test_a_missing_input_does_not_reach_the_encoder_and_one_that_is_no_input_is_refused(build):
    model = build()
    rows = []
    model.attach_encoders()
    model.encoders["0"].register_forward_pre_hook(
        lambda encoder, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    batch = collate(model, LACKING)
    model(**batch)
    assert rows == [4, 2]  # heavy, light
    with pytest.raises(ArgumentError, match=r"missing names \['lihgt'\]; this model reads \['heavy', 'light'\]"):
        model(**{**batch, "missing": {"lihgt": MISSING}})


@pytest.mark.parametrize("training", ["lora", "full"])
def test_encoders_learn_from_the_rows_that_have_the_input_alone(build, training):
    model = build(training=training)
    shift(model, "lora_" if training == "lora" else "encoder")

    def encoder_gradients(rows):
        model.zero_grad()
        model(**collate(model, rows), num_items_in_batch=4).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and "encoders" in n}

    both = encoder_gradients([LACKING[0], LACKING[1]])
    heavy = torch.tensor(0.0)
    apart = [encoder_gradients([row]) for row in LACKING[:2]]
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
