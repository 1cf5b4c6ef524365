"""The search for a head, on made-up embeddings: what it finds, what it may cost, what it holds out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_ext.affinity.heads.candidates import HeadSettings, first_candidates, neighbours
from hf_ext.affinity.heads.rows import HeadRows, make_folds
from hf_ext.affinity.heads.search import find_budget, search_head
from hf_ext.affinity.heads.training import Recipe, train_head

START = HeadSettings("mlp", (1024, 512, 256, 128), 0.3, 1e-3, 0.01, 30)
WIDTHS = (20, 15)


def rmse(predicted: np.ndarray, rows: HeadRows) -> float:
    return float(np.sqrt(np.mean((predicted - rows.labels) ** 2)))


def make_recipe(**values) -> Recipe:
    return Recipe(
        **{
            "widths": WIDTHS,
            "rows_per_step": 32,
            "warmup": 0.05,
            "scheduler": "linear",
            "max_grad_norm": 1.0,
            "max_steps": 0,
            "loss": "mse",
            "huber_delta": 1.0,
            "tobit_scale": 0.25,
            "measure": rmse,
            "seed": 0,
            **values,
        }
    )


def make_rows(num_rows: int, kind: str, seed: int) -> HeadRows:
    """Standard normal features of two inputs; labels are linear in them, or a product of a direction of each."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(num_rows, sum(WIDTHS)))
    first = features[:, :20] @ np.linspace(-1, 1, 20) / 2.5
    second = features[:, 20:] @ np.linspace(1, -0.5, 15) / 2
    labels = {"linear": first + second, "product": first * second, "noise": generator.normal(size=num_rows)}[kind]
    labels = 7 + labels + generator.normal(0, 0.1, num_rows)
    return HeadRows(torch.from_numpy(features).float(), labels, np.zeros(num_rows, np.int64))


def search(kind: str, fixed=(), budget: float = 8.0, **values):
    recipe = make_recipe(**values)
    folds = [(make_rows(600, kind, 0), make_rows(300, kind, 1))]
    return search_head(START, fixed, recipe, folds, budget, is_quiet=True)


@pytest.fixture(scope="module")
def on_products():
    return search("product")


@pytest.mark.nightly
def test_the_product_of_towers_is_found_where_labels_are_one(on_products):
    by_form = {(one["form"], *one["sizes"]): one["error"] for one in on_products.tried[:5]}
    assert on_products.chosen.form == "product"
    assert by_form["product", 64] < 0.8 * by_form["mlp", 64]


@pytest.mark.nightly
def test_of_equal_heads_the_one_with_the_fewest_weights_is_taken():
    found = search("linear", fixed=("epochs", "learning_rate", "dropout", "weight_decay"))
    lowest = min(one["error"] for one in found.tried)
    near_enough = (1 + 0.3 / 300**0.5) * lowest
    near = [one["num_weights"] for one in found.tried if one["is_complete"] and one["error"] <= near_enough]
    assert found.chosen.num_weights(WIDTHS) == min(near)
    assert found.ridge_error < 0.12  # the noise is 0.1: nothing beats a ridge here


@pytest.mark.nightly
def test_the_same_search_finds_the_same_and_leaves_the_random_state(on_products):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = search("product")
    assert torch.equal(torch.get_rng_state(), before)
    assert replace(again, seconds=0.0) == replace(on_products, seconds=0.0)
    assert search("product", budget=0.5, seed=1).tried[0]["error"] != again.tried[0]["error"]


@pytest.mark.nightly
def test_more_budget_tries_more_and_the_first_is_tried_in_any_case(on_products):
    none, some = search("product", budget=0.0), search("product", budget=3.0)
    assert len(none.tried) == 1 < len(some.tried) < len(on_products.tried)


def test_where_longer_training_was_too_dear_the_chosen_head_trains_as_long_as_without_a_search():
    few = search("product", budget=0.0)
    assert (few.tried[0]["epochs"], few.chosen.epochs) == (17, 30)  # 300 steps of 18 an epoch


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 0.02), ("dropout", 0.2), ("weight_decay", 0.3), ("epochs", 4)]
)
def test_what_the_user_set_is_never_changed(name, value):
    start = replace(START, **{name: value})
    folds = [(make_rows(100, "linear", 0), make_rows(60, "linear", 1))]
    found = search_head(start, {name}, make_recipe(), folds, 3.0, is_quiet=True)
    assert {one[name] for one in found.tried} == {value} == {getattr(found.chosen, name)}
    free = [one for one in neighbours(start, START, ()) if getattr(one, name) != value]
    assert free  # the innocent twin: not fixed, it would change


def test_one_input_has_no_product_with_others():
    assert "product" not in {one.form for one in first_candidates(START, (), (35,), 300)}
    assert "product" in {one.form for one in first_candidates(START, (), WIDTHS, 300)}


def test_rates_that_diverge_are_no_winners():
    found = search("linear", fixed=("learning_rate",), budget=2.0)
    wild = search_head(
        replace(START, learning_rate=1e6),
        ("learning_rate",),
        make_recipe(max_grad_norm=0.0),
        [(make_rows(100, "linear", 0), make_rows(60, "linear", 1))],
        1.0,
        is_quiet=True,
    )
    assert all(one["error"] is None or one["error"] > 10 * found.tried[0]["error"] for one in wild.tried)


def test_a_budget_is_a_share_of_a_run_with_the_large_head():
    one = find_budget(make_recipe(rows_per_step=10), 100)
    assert find_budget(make_recipe(rows_per_step=10), 200) == pytest.approx(2 * one)
    assert find_budget(make_recipe(rows_per_step=20), 200) > one
    # 30 epochs of 10 steps.
    weights = 35 * 1024 + 1024 * 512 + 512 * 256 + 256 * 128 + 128
    step = 0.0045 + weights * 5e-9 + 10 * (weights * 9e-11 + 35 * 3e-9)
    assert one == pytest.approx(0.9 * 300 * step)


def test_steps_are_bounded_and_a_part_of_an_epoch_counts():
    recipe = make_recipe(max_steps=5)
    rows = make_rows(96, "linear", 0), make_rows(30, "linear", 1)
    assert train_head(replace(START, sizes=(4,), epochs=2), recipe, *rows).steps == 5
    assert train_head(replace(START, sizes=(4,), epochs=0.5), make_recipe(), *rows).steps == 2


def test_a_bound_of_gradients_below_0_clips_nothing_as_0_does():
    rows = make_rows(96, "linear", 0), make_rows(30, "linear", 1)
    bounds = [make_recipe(max_grad_norm=bound) for bound in (0, -1, 0.1)]
    trained = [train_head(replace(START, sizes=(4,)), recipe, *rows) for recipe in bounds]
    assert trained[0].errors == trained[1].errors != trained[2].errors


def test_a_head_far_behind_its_rival_is_given_up():
    rows = make_rows(320, "linear", 0), make_rows(60, "linear", 1)
    settings = replace(START, sizes=(8,), dropout=0.0, epochs=20)
    alone = train_head(settings, make_recipe(), *rows)
    assert alone.steps == 200
    assert train_head(settings, make_recipe(), *rows, rival=alone.errors).errors == alone.errors
    beaten = train_head(settings, make_recipe(), *rows, rival=[0.01 * error for error in alone.errors])
    assert beaten.steps == 60  # 0.3 of them


# --- what is held out -------------------------------------------------------------------------------------------------


def test_enough_validation_rows_stand_alone():
    train, validation = make_rows(500, "linear", 0), make_rows(250, "linear", 1)
    assert make_folds(train, validation, None, 0) == [(train, validation)]


def test_few_validation_rows_are_joined_by_parts_of_training_that_share_no_row():
    train, validation = make_rows(500, "linear", 0), make_rows(60, "linear", 1)
    folds = make_folds(train, validation, None, 0)
    assert [len(held_out) for _, held_out in folds] == [60, 100, 100]
    labels = [set(held_out.labels) for _, held_out in folds[1:]]
    assert not labels[0] & labels[1]
    for (rest, held_out), known in zip(folds[1:], labels):
        assert not known & set(rest.labels)
        assert len(rest) + len(held_out) == 500


def test_parts_have_whole_units_and_cutting_by_row_would_not():
    train, validation = make_rows(400, "linear", 0), make_rows(300, "linear", 1)
    units = [f"antibody {i % 25}" for i in range(400)], [f"new {i % 4}" for i in range(300)]
    unit_of = dict(zip(train.labels, units[0]))
    folds = make_folds(train, validation, units, 0)
    assert len(folds) == 3  # 4 units in validation and 5 in each part: at least 10
    for rest, held_out in folds[1:]:
        assert not {unit_of[label] for label in rest.labels} & {unit_of[label] for label in held_out.labels}
    by_row = make_folds(train, make_rows(60, "linear", 1), None, 0)[1]
    assert {unit_of[label] for label in by_row[0].labels} & {unit_of[label] for label in by_row[1].labels}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_tiny_sets_are_searched_too(num_rows):
    folds = make_folds(make_rows(num_rows, "linear", 0), make_rows(1, "linear", 1), None, 0)
    found = search_head(START, (), make_recipe(), folds, 0.5, is_quiet=True)
    assert found.num_folds == len(folds)
    assert found.tried[0]["error"] is not None
