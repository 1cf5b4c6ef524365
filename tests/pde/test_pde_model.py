"""The operator: its loss by hand, any split of a batch, any points, one task or two; saved, compiled, recomputed."""

from __future__ import annotations

import pytest
import torch

from hf_ext.errors import ArgumentError
from hf_ext.pde.configuration import OperatorConfig
from hf_ext.pde.data import TASKS, load_task, measure_units
from hf_ext.pde.layers import rotate
from hf_ext.pde.model import OperatorTransformer, relative_l2

RESOLUTION = 16
POINTS = RESOLUTION**2
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "decoder_channels": 8}


@pytest.fixture(scope="module")
def samples():
    return {name: load_task(name, "train", 6, resolution=RESOLUTION, seed=0) for name in TASKS}


@pytest.fixture
def batch(samples):
    inputs = {f"{name}_inputs": torch.from_numpy(found["inputs"]) for name, found in samples.items()}
    labels = [torch.from_numpy(found["targets"]).flatten(1) for found in samples.values()]
    return {**inputs, "labels": torch.stack(labels, dim=1)}


@pytest.fixture
def make(samples):
    def build(**given):
        torch.manual_seed(0)
        tasks = given.get("tasks", [*TASKS])
        units = measure_units({name: samples[name] for name in tasks})
        return OperatorTransformer(OperatorConfig(**{"resolution": RESOLUTION, **SHAPE, **units, **given}))

    return build


def pick(batch, rows):
    return {name: value[rows] for name, value in batch.items()}


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def are_close(one, other, tolerance=1e-5) -> bool:
    scale = max(value.abs().max() for value in one.values())
    return all((one[name] - other[name]).abs().max() <= tolerance * scale for name in one)


def test_relative_l2_by_hand():
    found = relative_l2(torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    assert found.tolist() == pytest.approx([0.8, 0.0])
    assert relative_l2(torch.ones(2), torch.zeros(2)).isfinite()


def test_an_exact_prediction_has_a_finite_gradient():
    exact = torch.ones(3, requires_grad=True)
    relative_l2(exact, torch.ones(3)).backward()
    assert exact.grad.tolist() == [0, 0, 0]


def test_the_loss_is_the_weighted_sum_of_relative_l2(make, batch):
    output = make(task_weights=[1.0, 3.0])(**batch)
    errors = (output.logits - batch["labels"]).norm(dim=2) / batch["labels"].norm(dim=2)
    assert output.loss.item() == pytest.approx((errors[:, 0] + 3 * errors[:, 1]).mean().item(), rel=1e-5)
    assert output.logits.shape == (6, 2, POINTS)


def test_row_losses_add_up_to_the_loss(make, batch):
    model = make(task_weights=[1.0, 3.0]).eval()
    output = model(**batch)
    assert model.row_losses(output.logits, batch["labels"]).mean().item() == pytest.approx(output.loss.item())


def test_parts_of_a_batch_add_up_to_its_gradient(make, batch):
    def backward(parts, **given):
        model = make()
        for rows in parts:
            model(**pick(batch, rows), **given).loss.backward()
        return gradients(model)

    whole, parts = [slice(0, 6)], [slice(0, 1), slice(1, 6)]
    expected = backward(whole)
    assert are_close(expected, backward(parts, num_items_in_batch=batch["labels"].numel()))
    assert not are_close(expected, backward(parts))  # means of unequal parts


def test_every_weight_has_a_gradient_in_every_step(make, batch):
    """Those of `input_decoders` too, of which nothing is read without terms: DDP waits for all."""
    model = make()
    model(**batch).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    reached = {name.split(".")[0] for name, gradient in gradients(model).items() if gradient.abs().max() > 0}
    assert reached == {"encoders", "blocks", "decoders"}


def test_single_points_are_predicted_as_among_all(make, batch):
    model = make().eval()
    points = torch.stack([torch.randperm(POINTS)[:7] for _ in range(12)]).view(6, 2, 7)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = model(**inputs).logits.take_along_dim(points, dim=2)
    found = model(**inputs, points=points).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, expected.roll(1, dims=2), atol=1e-3)


def test_points_lie_where_the_grid_says(make):
    model = make()
    for name, task in TASKS.items():
        grid = torch.from_numpy(task.query_grid(RESOLUTION))
        assert torch.equal(model.coordinates(name, torch.arange(POINTS)), grid)


def test_both_tasks_in_one_batch_are_as_each_alone(make, batch):
    model = make().eval()
    encoded = [model.encode(name, batch[f"{name}_inputs"]) for name in TASKS]
    assert encoded[0].shape == encoded[1].shape == (6, 16, 16)
    together = model.propagate(*encoded)
    for name, one, both in zip(TASKS, encoded, together):
        (alone,) = model.propagate(one, tasks=[name])
        assert torch.allclose(alone, both, atol=1e-5)
    (other,) = model.propagate(encoded[0], tasks=["darcy2d"])
    assert not torch.allclose(other, together[0], atol=1e-3)


def test_attention_knows_distances_not_places():
    angles = torch.arange(6.0).view(1, 1, 6, 1) * torch.tensor([1.0, 0.5])
    query, key = (rotate(torch.randn(1, 1, 1, 4).expand(1, 1, 6, 4), angles.cos(), angles.sin()) for _ in range(2))
    scores = (query @ key.transpose(2, 3))[0, 0]
    for distance in range(-2, 3):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert scores[0].std() > 0.1


def test_advection_is_periodic_and_darcy_flow_vanishes_at_the_boundary(make, batch):
    model = make().eval()
    latents = model.propagate(*(model.encode(name, batch[f"{name}_inputs"]) for name in TASKS))
    ends = torch.tensor([[0.0, 0.5], [1.0, 0.5], [0.999999, 0.5]]).expand(6, -1, -1)
    left, right, near = model.decode("advection1d", latents[0], ends).unbind(1)
    assert torch.allclose(left, right, atol=1e-5)
    assert torch.allclose(left, near, atol=1e-4)
    edge = torch.rand(6, 20, 2)
    edge[:, ::2, 0], edge[:, 1::2, 1] = 0.0, 1.0
    assert model.decode("darcy2d", latents[1], edge).abs().max() == 0
    assert model.decode("darcy2d", latents[1], torch.full((6, 1, 2), 0.5)).abs().min() > 0


def test_between_points_of_the_grid_maps_are_interpolated(make, batch):
    """With coordinates that say nothing, and linear layers, the middle of two points is their mean."""
    model = make().eval()
    decoder = model.decoders["advection1d"]
    decoder.from_place.weight.data.zero_()
    decoder.from_maps.bias.data.fill_(100.0)  # where GELU is linear
    decoder.hidden.weight.data.abs_()
    latents = model.encode("advection1d", batch["advection1d_inputs"])
    spots = torch.tensor([[3 / 64, 1.0], [3.5 / 64, 1.0], [4 / 64, 1.0]]).expand(6, -1, -1)
    first, middle, second = model.decode("advection1d", latents, spots).unbind(1)
    assert torch.allclose(middle, (first + second) / 2, atol=1e-3 * (first - second).abs().max().item() + 1e-3)
    assert (first - second).abs().max() > 0.05


@pytest.mark.parametrize("name", TASKS)
def test_inputs_are_read_back_at_places_of_their_grid(make, batch, name):
    model = make()
    inputs = batch[f"{name}_inputs"]
    places = torch.arange(inputs[0].numel()).expand(6, -1)
    decoded = model.decode_inputs(name, model.encode(name, inputs), places)
    assert decoded.shape == inputs.flatten(1).shape
    few = model.decode_inputs(name, model.encode(name, inputs), places[:, 5:9])
    assert torch.allclose(few, decoded[:, 5:9], atol=1e-5)


def test_predictions_are_in_the_unit_of_the_data(make, batch):
    """The same network for data a thousand times as large, and moved by 5."""
    model = make().eval()
    units = {name: {**getattr(model.config, name)} for name in ("target_means", "target_stds")}
    for values in units.values():
        values.update({name: value * 1000 for name, value in values.items()})
    units["target_means"]["advection1d"] += 5
    scaled = make(**units).eval()
    plain, large = model(**batch).logits, scaled(**batch).logits
    assert torch.allclose(large[:, 0], 1000 * plain[:, 0] + 5, rtol=1e-4, atol=1e-3)
    assert torch.allclose(large[:, 1], 1000 * plain[:, 1], rtol=1e-4)


def test_a_model_of_one_task_reads_that_one_alone(make, batch):
    model = make(tasks=["darcy2d"])
    output = model(darcy2d_inputs=batch["darcy2d_inputs"], labels=batch["labels"][:, 1:])
    assert output.logits.shape == (6, 1, POINTS)
    with pytest.raises(ArgumentError, match="must be darcy2d_inputs"):
        model(**batch)
    with pytest.raises(ArgumentError, match="this model has darcy2d"):
        model.encode("advection1d", batch["advection1d_inputs"])


def test_a_saved_model_predicts_the_same(make, batch, tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    again = OperatorTransformer.from_pretrained(tmp_path).eval()
    assert again.config.target_stds == model.config.target_stds
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert not torch.equal(make(hidden_size=32).eval()(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_latents_and_loss_stay_float32(make, batch, dtype):
    model = make()
    plain = model(**batch)
    with torch.autocast("cpu", dtype):
        half = model(**batch)
        latents = model.propagate(*(model.encode(name, batch[f"{name}_inputs"]) for name in TASKS))
    assert half.loss.dtype == half.logits.dtype == latents[0].dtype == torch.float32
    assert 0 < (half.loss - plain.loss).abs() < 0.02


def test_a_model_all_in_half_precision_predicts_float32(make, batch):
    model = make().eval()
    expected = model(**batch)
    found = model.to(torch.bfloat16)(**batch)
    assert found.logits.dtype == torch.float32
    assert abs(found.loss - expected.loss) < 0.1


def test_blocks_compile_and_recompute_with_the_same_gradients(make, batch):
    plain, compiled, recomputed = make(), make(), make()
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    recomputed.activation_checkpointing_enable()
    for model in (plain, compiled, recomputed):
        model.train()(**batch).loss.backward()
    assert are_close(gradients(plain), gradients(compiled))
    assert are_close(gradients(plain), gradients(recomputed))
    assert recomputed.blocks[0].gradient_checkpointing


def test_terms_see_the_step_and_are_added_with_the_weight_of_their_task(make, batch):
    model = make(task_weights=[1.0, 3.0])
    plain, seen = model(**batch).loss, []

    def terms(of_model, task, step):
        seen.append((task, step))
        assert of_model is model
        return torch.full((6,), 0.5) if task == "darcy2d" else 0.0

    model.terms = terms
    points = torch.arange(3).expand(6, 2, 3)
    assert (model(**batch).loss - plain).item() == pytest.approx(1.5, rel=1e-4)
    few = model(**{**batch, "labels": batch["labels"][..., :3]}, points=points)
    assert [task for task, _ in seen] == [*TASKS] * 2
    assert torch.equal(seen[-1][1].predictions, few.logits[:, 1])
    assert torch.equal(seen[-1][1].inputs, batch["darcy2d_inputs"])
    assert seen[-1][1].points.shape == (6, 3)
    assert seen[-1][1].latents.shape == seen[-1][1].encoded.shape == (6, 16, 16)
    count = len(seen)
    assert model.eval()(**batch).loss.item() == pytest.approx(plain.item())
    assert len(seen) == count


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.pop("darcy2d_inputs"), "must be advection1d_inputs, darcy2d_inputs"),
        (lambda b: b.update(burgers_inputs=b["labels"]), "burgers_inputs"),
        (lambda b: b.update(darcy2d_inputs=b["darcy2d_inputs"][:, :8]), r"must be \(rows, 16, 16\)"),
        (lambda b: b.update(labels=b["labels"][:, :1]), "labels and points"),
        (lambda b: b.update(labels=b["labels"][..., :9]), "labels and points"),
        (lambda b: b.update(points=torch.zeros(6, 2, 4, dtype=torch.int64)), "labels and points"),
    ],
)
def test_batches_that_do_not_fit_are_refused(make, batch, change, words):
    change(batch)
    with pytest.raises(ArgumentError, match=words):
        make()(**batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tasks": ["burgers"]}, "advection1d, darcy2d"),
        ({"tasks": []}, "one or more"),
        ({"tasks": ["darcy2d", "darcy2d"]}, "each once"),
        ({"task_weights": [1.0]}, "task_weights"),
        ({"task_weights": [1.0, 0.0]}, "above 0"),
        ({"hidden_size": 20, "num_attention_heads": 2}, "four times"),
        ({"resolution": 18}, "patch_size"),
        ({"patch_size": 1}, "even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_no_model_could_be_built_of_is_refused(given, words):
    with pytest.raises(ArgumentError, match=words):
        OperatorConfig(**{"resolution": RESOLUTION, **SHAPE, **given})


def test_few_steps_learn_the_training_rows(make, batch):
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    first = model(**batch).loss.item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 3
