import pytest
import torch
from tiny_affinity import ROWS, make_batch, make_model, predict, shift
from tiny_t5 import write_t5_encoder

from hf_ext.errors import ArgumentError


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


def test_towers_that_name_the_same_encoder_share_its_weights(folders):
    model = make_model([folders["esm"], folders["esm"]], "full")
    assert list(model.encoders) == ["0"]
    alone = make_model([folders["esm"]])
    batch = make_batch(model)["sequences"]
    model.eval(), alone.eval()
    for name in ("heavy", "light"):
        assert torch.equal(model.encode(name, batch[name]), alone.encode("heavy", batch[name]))


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
    assert any("contact_head" in name for name, _ in model.named_parameters())


def test_only_adapters_and_head_train_under_lora(all_three):
    model = make_model(all_three, "lora")
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.startswith("head.") or "lora_" in name for name in trainable} == {True}
    # Two layers each: 6 linear layers in BERT and ESM; q, k, v, o, wi_0, wi_1, wo in T5; two matrices per layer.
    adapters = [sum(f"encoders.{i}." in name for name in trainable) for i in range(3)]
    assert adapters == [2 * 6 * 2, 2 * 7 * 2, 2 * 6 * 2]


def linear_dtypes(model, batch):
    """Dtypes that come out of the first attention layer's query."""
    dtypes = []
    model.attach_encoders()
    query = model.encoders["0"].encoder.layer[0].attention.self.query
    handle = query.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    embedding = model.encode("heavy", batch)
    handle.remove()
    return dtypes, embedding


@pytest.mark.parametrize(
    ("training", "encoder_autocast", "outer", "dtype"),
    [
        ("full", None, True, torch.bfloat16),
        ("lora", None, True, torch.bfloat16),
        ("full", None, False, torch.float32),
        ("frozen", None, True, torch.float32),
        ("frozen", "bfloat16", False, torch.bfloat16),
        ("full", "bfloat16", False, torch.float32),
    ],
)
def test_training_towers_follow_the_trainers_autocast_and_frozen_ones_their_own(
    folders, training, encoder_autocast, outer, dtype
):
    model = make_model([folders["esm"]], training, encoder_autocast=encoder_autocast).eval()
    batch = make_batch(model)["sequences"]["heavy"]
    with torch.autocast("cpu", torch.bfloat16, enabled=outer):
        dtypes, embedding = linear_dtypes(model, batch)
    assert dtypes == [dtype]
    assert embedding.dtype == torch.float32


def test_released_encoders_leave_the_model_and_come_back_equal(folders):
    model = make_model([folders["bert"], folders["esm"]]).eval()
    assert not any(name.startswith("encoders.") for name in model.state_dict())
    expected = predict(model, make_batch(model))  # loads them
    assert sorted(model.encoders) == ["0", "1"]
    model.release_encoders()
    assert not any(name.startswith("encoders.") for name in model.state_dict())
    assert torch.equal(predict(model, make_batch(model)), expected)


def test_a_transform_reaches_encoders_in_memory_and_those_loaded_later(folders):
    model = make_model([folders["bert"], folders["esm"]])
    model.encode("heavy", make_batch(model)["sequences"]["heavy"])
    model.release_encoders()
    seen = []
    model.transform_encoders(lambda encoder: seen.append(encoder.config.model_type))
    assert seen == []
    model.attach_encoders()
    assert seen == ["bert", "esm"]
    model.transform_encoders(lambda encoder: seen.append("again"))
    assert seen[2:] == ["again", "again"]


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
