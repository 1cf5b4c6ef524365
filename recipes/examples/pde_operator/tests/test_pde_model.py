"""The operator: rows of all tasks, its loss by hand, any points, one task or two, auxiliary terms; saved, compiled."""

import pytest
import torch
from operators import RESOLUTION, TASKS, make_operator, make_samples
from pde_operator.configuration import OperatorConfig, num_points
from pde_operator.data import OperatorCollator, OperatorRows, choose_points, measure_units
from pde_operator.model import OperatorTransformer, TaskStep, relative_l2
from pde_operator.results import ErrorMetrics, score_split, trivial_errors
from pde_operator.terms import AuxiliaryTerms, constant_along_characteristics, inverse_loss, ritz_energy
from torch.utils.data import DataLoader
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models import recompute
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_POINTS = 12


def make_rows(is_evaluation: bool = False) -> OperatorRows:
    """Task k, sample i, point q has the value 100 k + 20 i + q."""
    samples = {
        name: {
            "inputs": torch.arange(5.0)[:, None],
            "targets": 100.0 * k + 20 * torch.arange(5)[:, None] + torch.arange(NUM_POINTS),
        }
        for k, name in enumerate(TASKS)
    }
    return OperatorRows(samples, is_evaluation)


def test_labels_are_those_of_the_points_and_a_row_keeps_them_in_any_batch():
    rows = make_rows()
    collator = OperatorCollator(TASKS, NUM_POINTS, 4, seed=1)
    together = collator([rows[i] for i in range(5)])
    assert together["points"].shape == together["labels"].shape == (5, 2, 4)
    for i, (row, alone) in enumerate((i, collator([rows[i]])) for i in (4, 0, 2)):
        assert torch.equal(alone["points"][0], together["points"][row]), i
        for k in range(2):
            assert torch.equal(alone["labels"][0, k], 100.0 * k + 20 * row + alone["points"][0, k])
    assert len({tuple(points.tolist()) for points in together["points"].flatten(0, 1)}) > 5  # not one choice for all
    rows = make_rows(is_evaluation=True)  # which has all points
    batch = collator([rows[0], rows[1]])
    assert "points" not in batch
    assert batch["labels"].shape == (2, 2, NUM_POINTS)


def test_another_epoch_or_seed_draws_other_points_also_in_workers_that_live_on():
    rows = make_rows()
    collator = OperatorCollator(TASKS, NUM_POINTS, 4)
    loader = DataLoader(rows, 5, collate_fn=collator, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1, 0):
        collator.set_epoch(epoch)
        (batch,) = loader
        seen.append(batch["points"])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(
        seen[0], OperatorCollator(TASKS, NUM_POINTS, 4, seed=9)([rows[i] for i in range(5)])["points"]
    )


def test_the_choice_of_points_is_this_one_for_good():
    """Another one would give every run that goes on from a checkpoint other points."""
    assert choose_points(8, 3, seed=0, epoch=0, row_ids=["a", 7]).tolist() == [[1, 2, 6], [0, 3, 5]]


def test_metrics_are_means_over_rows_of_each_task_by_hand():
    labels = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 5.0]]])
    logits = torch.tensor([[[3.0, 4.5], [1.5, 0.0]], [[0.0, 1.0], [0.0, 5.0]]])
    metrics = ErrorMetrics(TASKS)
    errors = metrics.reduce(logits, labels)
    assert errors.flatten().tolist() == pytest.approx([0.1, 0.5, 0.5, 0.0])

    class Prediction:
        predictions = errors.numpy()

    expected = {"advection1d_nrmse": 0.3, "darcy2d_nrmse": 0.25, "nrmse": 0.275}
    assert metrics(Prediction) == pytest.approx(expected)
    weighted = ErrorMetrics(TASKS, [1.0, 3.0])
    rows = {name: weighted.row_values(name, Prediction.predictions).tolist() for name in weighted.row_metrics}
    assert rows["loss"] == pytest.approx([1.6, 0.5])
    assert rows["nrmse"] == pytest.approx([0.3, 0.25])
    assert (rows["advection1d_nrmse"], rows["darcy2d_nrmse"]) == (pytest.approx([0.1, 0.5]), pytest.approx([0.5, 0.0]))


def test_scores_stand_beside_the_best_trivial_prediction_of_each_task():
    train = {name: {"inputs": torch.ones(2, 2).numpy(), "targets": torch.ones(2, 1, 2).numpy()} for name in TASKS}
    split = {
        name: {"inputs": torch.full((40, 2), 4.0).numpy(), "targets": torch.full((40, 1, 2), 2.0).numpy()}
        for name in TASKS
    }
    trivial = trivial_errors(train, split)  # the mean is half of it, the initial state twice
    assert trivial["training mean"].tolist() == [[0.5, 0.5]] * 40
    assert trivial["persistence"][:, 0].tolist() == [1.0] * 40
    found = score_split(torch.full((40, 2), 0.1).double().numpy(), trivial, TASKS, seed=0)
    assert found["factors"] == pytest.approx({"advection1d": 5.0, "darcy2d": 5.0})
    assert found["verdict"]["outcome"] == "better"
    worse = score_split(torch.full((40, 2), 0.7).double().numpy(), trivial, TASKS, seed=0)
    assert worse["verdict"]["outcome"] == "no better"
    assert "darcy2d_nrmse" not in found["scores"]["persistence"]


POINTS = RESOLUTION**2
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "decoder_channels": 8}


@pytest.fixture(scope="module")
def samples():
    return make_samples(6)


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
    exact = torch.ones(3, requires_grad=True)
    relative_l2(exact, torch.ones(3)).backward()
    assert exact.grad.tolist() == [0, 0, 0]


def test_the_loss_is_the_weighted_sum_of_relative_l2(make, batch):
    model = make(task_weights=[1.0, 3.0]).eval()
    output = model(**batch)
    errors = (output.logits - batch["labels"]).norm(dim=2) / batch["labels"].norm(dim=2)
    assert output.loss.item() == pytest.approx((errors[:, 0] + 3 * errors[:, 1]).mean().item(), rel=1e-5)
    assert model.row_losses(output.logits, batch["labels"]).mean().item() == pytest.approx(output.loss.item())
    assert output.logits.shape == (6, 2, POINTS)


def test_parts_of_a_batch_add_up_to_its_gradient(make, batch):
    def backward(parts, **given):
        model = make()
        for rows in parts:
            model(**pick(batch, rows), **given).loss.backward()
        return gradients(model)

    whole = [slice(0, 6)]
    parts = [slice(0, 1), slice(1, 6)]
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


def test_advection_is_periodic_and_darcy_flow_vanishes_at_the_boundary(make, batch):
    model = make().eval()
    latents = model.propagate(*(model.encode(name, batch[f"{name}_inputs"]) for name in TASKS))
    ends = torch.tensor([[0.0, 0.5], [1.0, 0.5], [0.999999, 0.5]]).expand(6, -1, -1)
    left, right, near = model.decode("advection1d", latents[0], ends).unbind(1)
    assert torch.allclose(left, right, atol=1e-5)
    assert torch.allclose(left, near, atol=1e-4)
    edge = torch.rand(6, 20, 2)
    edge[:, ::2, 0] = 0.0
    edge[:, 1::2, 1] = 1.0
    assert model.decode("darcy2d", latents[1], edge).abs().max() == 0
    assert model.decode("darcy2d", latents[1], torch.full((6, 1, 2), 0.5)).abs().min() > 0


def test_predictions_are_in_the_unit_of_the_data(make, batch):
    """The same network for data a thousand times as large, and moved by 5."""
    model = make().eval()
    units = {name: {**getattr(model.config, name)} for name in ("target_means", "target_stds")}
    for values in units.values():
        values.update({name: value * 1000 for name, value in values.items()})
    units["target_means"]["advection1d"] += 5
    scaled = make(**units).eval()
    plain = model(**batch).logits
    large = scaled(**batch).logits
    assert torch.allclose(large[:, 0], 1000 * plain[:, 0] + 5, rtol=1e-4, atol=1e-3)
    assert torch.allclose(large[:, 1], 1000 * plain[:, 1], rtol=1e-4)


def test_a_model_of_one_task_reads_that_one_alone(make, batch):
    model = make(tasks=["darcy2d"])
    output = model(darcy2d_inputs=batch["darcy2d_inputs"], labels=batch["labels"][:, 1:])
    assert output.logits.shape == (6, 1, POINTS)


def test_a_saved_model_predicts_the_same(make, batch, tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    for again in (OperatorTransformer.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(again) is OperatorTransformer
        assert again.config.target_stds == model.config.target_stds
        assert torch.equal(again.eval()(**batch).logits, model(**batch).logits)
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


def test_blocks_compile_and_recompute_with_the_same_gradients(make, batch):
    plain = make()
    compiled = make()
    recomputed = make()
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    recomputed.activation_checkpointing_enable()
    for model in (plain, compiled, recomputed):
        model.train()(**batch).loss.backward()
    assert are_close(gradients(plain), gradients(compiled))
    assert are_close(gradients(plain), gradients(recomputed))
    assert recomputed.blocks[0].gradient_checkpointing
    for parts in ("attention", "feed_forward", "layers"):
        model = make()
        assert recompute(model, parts) == len(model.blocks)
        model.train()(**batch).loss.backward()
        assert are_close(gradients(plain), gradients(model))


def test_batches_that_do_not_fit_are_refused(make, batch):
    for change, words in (
        ({"darcy2d_inputs": batch["darcy2d_inputs"][:, :8]}, r"must be \(rows, 16, 16\)"),
        ({"labels": batch["labels"][:, :1]}, "labels of shape"),
        ({"labels": batch["labels"][..., :9]}, "labels of shape"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()(**{**batch, **change})


def test_what_no_model_could_be_built_of_is_refused():
    for given, words in (
        ({"tasks": ["burgers"]}, "advection1d, darcy2d"),
        ({"tasks": []}, "one or more"),
        ({"tasks": ["darcy2d", "darcy2d"]}, "each once"),
        ({"task_weights": [1.0]}, "task_weights"),
        ({"task_weights": [1.0, 0.0]}, "above 0"),
        ({"hidden_size": 20, "num_attention_heads": 2}, "four times"),
        ({"resolution": 18}, "patch_size"),
        ({"patch_size": 1}, "even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ):
        with pytest.raises(ArgumentError, match=words):
            OperatorConfig(**{"resolution": RESOLUTION, **SHAPE, **given})


class Exact:
    """Stands in for a trained operator: decodes what it is given, wherever that lies on the grid."""

    def __init__(self, field: torch.Tensor, model):
        self.field = field
        self.config = model.config
        self.coordinates = model.coordinates

    def decode(self, task: str, latents: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        row = (queries[..., 0] * RESOLUTION).floor().long()
        column = (queries[..., 1] * RESOLUTION).floor().long()
        return self.field.flatten(1).take_along_dim(row * RESOLUTION + column, dim=1)


def all_points(num: int) -> torch.Tensor:
    """Every cell among the 5th ones, in their order."""
    return torch.arange(RESOLUTION**2).repeat_interleave(5).expand(num, -1)


@pytest.fixture(scope="module")
def darcy():
    samples = make_samples(3)["darcy2d"]
    model = make_operator()
    inputs = torch.from_numpy(samples["inputs"])
    u = torch.from_numpy(samples["targets"])
    points = all_points(len(u))

    def energy(field: torch.Tensor) -> torch.Tensor:
        step = TaskStep(inputs, inputs, inputs, points, field.flatten(1))
        return ritz_energy(Exact(field, model), step)

    return energy, u, model


def test_the_solution_has_the_least_energy_of_all_fields(darcy):
    energy, u, _ = darcy
    least = energy(u)
    bump = torch.zeros_like(u)
    bump[:, 5, 9] = 0.1 * u.mean()
    noise = 0.05 * u.mean() * torch.randn(u.shape, generator=torch.Generator().manual_seed(0))
    for other in (0.9 * u, 1.1 * u, u + bump, u - bump, u + noise, u + 0.05 * u.mean(), torch.zeros_like(u)):
        assert (energy(other) > least).all()


@pytest.mark.parametrize(("speed", "is_solution"), [(0.4, True), (0.5, False)])
def test_only_the_right_speed_is_constant_along_characteristics(speed, is_solution):
    model = make_operator()

    class Wave:
        config = model.config
        coordinates = model.coordinates

        def decode(self, task, latents, queries):
            x, t = queries.unbind(-1)
            return torch.sin(2 * torch.pi * 3 * (x - speed * t))

    points = torch.arange(RESOLUTION**2)[None]
    wave = Wave()
    here = wave.decode("advection1d", None, model.coordinates("advection1d", points))
    initial = wave.decode("advection1d", None, torch.stack([torch.linspace(0, 1, 65)[:-1], torch.zeros(64)], -1))[None]
    found = constant_along_characteristics(wave, TaskStep(initial, initial, initial, points, here))
    assert (found < 1e-4).all() if is_solution else (found > 0.1).all()


def test_an_inverse_loss_is_0_where_inputs_are_read_back_exactly():
    class Reader:
        def __init__(self, factor):
            self.factor = factor

        def encode(self, task, inputs):
            return inputs.flatten(1)[..., None]

        def decode_inputs(self, task, latents, places):
            return self.factor * latents[..., 0].take_along_dim(places, dim=1)

    inputs = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)) + 1
    encoded = Reader(1.0).encode("darcy2d", inputs)
    points = torch.arange(64).expand(2, -1)
    step = TaskStep(inputs, encoded, encoded, points, inputs.flatten(1))
    assert inverse_loss(Reader(1.0), "darcy2d", step).tolist() == [0.0, 0.0]
    # A tenth too large everywhere: a tenth of error in what is read back, and a tenth in its encoding.
    assert inverse_loss(Reader(1.1), "darcy2d", step) == pytest.approx([0.2, 0.2], rel=1e-5)
    few = TaskStep(inputs, encoded, encoded, points[:, :16], inputs.flatten(1)[:, :16])
    assert (inverse_loss(Reader(1.1), "darcy2d", few) < 0.2).all()  # the rest of the grid stays as it was


def test_terms_are_due_in_every_nth_step_of_training_alone():
    model = make_operator()
    batch = {f"{task}_inputs": torch.from_numpy(found["inputs"]) for task, found in make_samples(2).items()}
    targets = [torch.from_numpy(found["targets"]).flatten(1) for found in make_samples(2).values()]
    batch["labels"] = torch.stack(targets, dim=1)

    def loss(step: int, training: bool, **given) -> float:
        model.terms = AuxiliaryTerms(**given)
        model.terms.schedule.taken = step
        return float(model.train(training)(**batch).loss.detach())

    plain = loss(0, True)
    assert [loss(step, True, inverse_every=3) > plain for step in range(5)] == [True, False, False, True, False]
    assert [loss(step, True, physics_every=2) != plain for step in range(4)] == [True, False, True, False]
    assert loss(0, False, inverse_every=1, physics_every=1) == pytest.approx(loss(0, False))
    assert loss(0, True, inverse_every=1, inverse_weight=0.0) == plain
    once, twice = (loss(0, True, inverse_every=1, inverse_weight=weight) - plain for weight in (0.1, 0.2))
    assert twice == pytest.approx(2 * once, rel=1e-3)


def test_terms_and_points_are_alike_for_any_accumulation_and_after_a_resume(tmp_path):
    def train(name, passes, resume=None, is_told=True):
        torch.manual_seed(0)
        model = make_operator()
        terms = AuxiliaryTerms(inverse_every=3, inverse_weight=1.0)
        model.terms = terms
        fixed = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True}
        fixed |= {"report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
        sizes = {"per_device_train_batch_size": 4 // passes, "gradient_accumulation_steps": passes}
        args = FastTrainingArguments(str(tmp_path / name), **fixed, **sizes)
        collator = OperatorCollator(TASKS, num_points(RESOLUTION), 8)
        trainer = FastTrainer(model, args, collator, OperatorRows(make_samples(8)), callbacks=[terms.schedule])
        if not is_told:
            trainer.remove_callback(terms.schedule)
        trainer.train(resume_from_checkpoint=resume)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    whole = train("whole", 2)
    assert torch.equal(train("resumed", 2, str(tmp_path / "whole" / "checkpoint-4")), whole)
    assert (train("once", 1) - whole).abs().max() < 1e-4
    assert (train("untold", 1, is_told=False) - whole).abs().max() > 1e-3  # the term in every step


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_proven_on_first_rows_for_a_card_and_refused_for_training_on_a_cpu(tmp_path, monkeypatch):
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    args = FastTrainingArguments(str(tmp_path), attention="flex", **quiet)
    model, rows = make_operator(), OperatorRows(make_samples(8))
    given = (OperatorCollator(TASKS, num_points(RESOLUTION), 8), rows)
    with pytest.raises(PlanRefused, match=r"--attention flex: cpu.* has no Triton, without which FlexAttention has"):
        FastTrainer(model, args, *given)
    plan = make_plan(args, model, *reversed(given), describe_hardware("A100"))
    with torch.compiler.set_stance("force_eager"):  # which is how a CPU computes it in little time
        trainer = FastTrainer(model, args, *given, plan=plan)
        assert model.config._attn_implementation == "flex_attention"
        assert 0 < trainer.plan["attention"].evidence["max_difference"] < 1e-5
        trainer.end()
        right = ALL_ATTENTION_FUNCTIONS["flex_attention"]
        broken = {"flex_attention": lambda *inputs, **kwargs: (1.01 * right(*inputs, **kwargs)[0], None)}
        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", broken)
        plan = make_plan(args, model, *reversed(given), describe_hardware("A100"))
        with pytest.raises(PlanRefused, match="flex_attention against the old attention: states differ"):
            FastTrainer(model, args, *given, plan=plan)
    assert model.config._attn_implementation == "sdpa"
