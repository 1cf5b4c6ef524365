"""Nothing of a fold's model comes from rows that it is tested on: twelve leaks are planted, and each is noticed."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from test_folds import LETTERS, QUICK, as_rows, make_rows

from hf_ext.baselines import pooled_features
from hf_ext.data import Fold, nearest_identities, splits
from hf_ext.heads import ensemble
from hf_ext.models import AffinityModel
from hf_ext.property import TASK, repeats, steps
from hf_ext.training import embedding_cache

pytestmark = pytest.mark.internals
TIMES = ("seconds",)
Seen = dict[str, Any]


def other_rows(rows: pd.DataFrame, what: str, site: str = "a") -> pd.DataFrame:
    """The same rows, but at one site labels are turned round, or sequences read backwards, without their first."""
    changed = rows.copy()
    chosen = changed["site"] == site
    if what == "sequences":
        changed.loc[chosen, "sequence"] = changed.loc[chosen, "sequence"].str[:0:-1]
    elif not pd.api.types.is_numeric_dtype(rows["label"]):
        changed.loc[chosen, "label"] = changed.loc[chosen, "label"].map({"low": "high", "high": "low"})
    else:
        changed.loc[chosen, "label"] = 30 - 2 * changed.loc[chosen, "label"]
    return changed


def drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: drop_times(one) for name, one in value.items() if name not in TIMES}
    return [drop_times(one) for one in value] if isinstance(value, list) else value


@pytest.fixture
def seen(monkeypatch) -> Seen:
    """The splits of the run that was made last, and its trainer once heads are mixed."""
    found: Seen = {}
    load, fit = steps.load_rows, steps.fit_ensemble

    def noted(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        found.update(loaded.splits)
        return loaded

    def noted_fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        found["trainer"] = trainer
        return fit(trainer, *args, **kwargs)

    monkeypatch.setattr(steps, "load_rows", noted)
    monkeypatch.setattr(steps, "fit_ensemble", noted_fit)
    return found


@pytest.fixture(scope="module")
def fit(tmp_path_factory, demo_encoders) -> Callable[..., dict[str, Any]]:
    """Makes the run of site a of these rows; returns all that it fitted, and what it predicts unless `is_blind`."""
    root = tmp_path_factory.mktemp("leaks")
    number = count()

    def fitted(rows: pd.DataFrame, words: str = "", is_blind: bool = False) -> dict[str, Any]:
        folder = root / str(next(number))
        folder.mkdir()
        rows.to_csv(folder / "rows.csv", index=False)
        given = f"--dataset_name {folder}/rows.csv --encoders {demo_encoders[1]} --embedding_cache_dir {root}/cache "
        quick = QUICK if "mlp" in words else QUICK.replace("--head_sizes 8 --head_dropout 0 ", "")
        run = TASK.parse(
            [*given.split(), *quick.split(), *words.split(), "--folds", "site", "--output_dir", str(folder)]
        )
        repeats.take_part(TASK, run, repeats.Part("fold_a/seed_42", Fold("site", "a"), 42), is_last=True)
        return read_fitted(folder / "fold_a" / "seed_42", is_blind)

    return fitted


def read_fitted(folder: Path, is_blind: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"config": drop_times(json.loads((folder / "config.json").read_text()))}
    found |= {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}
    tables = [] if is_blind else [folder / "predictions.csv", *sorted((folder / "baselines").glob("*.csv"))]
    for path in tables:
        table = pd.read_csv(path, dtype=str)
        found[path.name] = table[[name for name in table if name.startswith(("prediction", "probability"))]].to_dict(
            "list"
        )
    return found


def with_test(function: str, position: int, name: str) -> Callable[[Any, Seen], None]:
    """Makes a step read test rows where it should read those of split `name`; at `position` are rows or splits."""

    def plant(monkeypatch: Any, seen: Seen) -> None:
        original = getattr(steps, function)

        def leaky(*args: Any, **kwargs: Any) -> Any:
            given = [*args]
            is_rows = isinstance(given[position], Dataset)
            test = concatenate_datasets([seen["train"], seen["test"]]) if name == "train" else seen["test"]
            given[position] = test if is_rows else {**given[position], name: test}
            return original(*given, **kwargs)

        monkeypatch.setattr(steps, function, leaky)

    return plant


def scale_labels(monkeypatch: Any, seen: Seen) -> None:
    original = AffinityModel.fit_scaling
    monkeypatch.setattr(
        AffinityModel,
        "fit_scaling",
        lambda self, mean, *rest: original(self, mean + np.mean(seen["test"]["label"]), *rest),
    )


def scale_embeddings(monkeypatch: Any, seen: Seen) -> None:
    original = embedding_cache.EmbeddingCache._sample
    monkeypatch.setattr(
        embedding_cache.EmbeddingCache, "_sample", lambda *args: [*original(*args), *seen["test"]["sequence"][:]]
    )


def turn_directions(monkeypatch: Any, seen: Seen) -> None:
    original = ensemble.principal_directions

    def leaky(block: torch.Tensor) -> torch.Tensor:
        return original(torch.cat([block, torch.from_numpy(pooled_features(seen["trainer"], seen["test"]))]))

    monkeypatch.setattr(ensemble, "principal_directions", leaky)


def weigh_heads(monkeypatch: Any, seen: Seen) -> None:
    original = ensemble.choose_weights

    def leaky(*args: Any) -> Any:
        return np.roll(original(*args), int(100 * np.sum(seen["test"]["label"])))

    monkeypatch.setattr(ensemble, "choose_weights", leaky)


def choose_checkpoint(monkeypatch: Any, seen: Seen) -> None:
    original = type(TASK).build
    monkeypatch.setattr(type(TASK), "build", lambda *args: {**original(*args), "eval_dataset": seen["test"]})


AUTO, MLP = "--head auto", "--head mlp"
# What leaks -> what of the test rows changes, flags, and how it is planted.
LEAKS: dict[str, tuple[str, str, Callable[[Any, Seen], None]]] = {
    "scale of labels": ("labels", MLP, scale_labels),
    "scale of embeddings": ("sequences", MLP, scale_embeddings),
    "principal directions": ("sequences", AUTO, turn_directions),
    "layer": ("labels", f"{MLP} --layer auto", with_test("choose_layers", 2, "validation")),
    "weights of heads": ("labels", AUTO, weigh_heads),
    "temperature": ("classes", MLP, with_test("calibrate", 1, "validation")),
    "prediction intervals": ("labels", MLP, with_test("fit_intervals", 1, "validation")),
    "best checkpoint": ("labels", f"{MLP} --num_train_epochs 4", choose_checkpoint),
    "penalty of ridges": ("labels", MLP, with_test("score_split", 1, "validation")),
    "frequencies of classes": ("classes", MLP, with_test("score_split", 1, "train")),
}


def rows_for(what: str) -> pd.DataFrame:
    rows = make_rows()
    if what == "classes":
        rows["label"] = np.where(rows["label"] > 9.5, "high", "low").astype(object)
        generator = np.random.default_rng(1)
        rows.loc[(rows["site"] == "a") & (generator.random(len(rows)) < 0.3), "label"] = "low"
    return rows


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.nightly
@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_shows_as_a_change_of_what_was_fitted(leak, fit, seen, monkeypatch):
    what, words, plant = LEAKS[leak]
    rows = rows_for(what)
    changed = other_rows(rows, what)
    is_blind = what == "sequences"
    plant(monkeypatch, seen)
    assert differing(fit(rows, words, is_blind), fit(changed, words, is_blind)), f"nobody would notice: {leak}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "words"),
    [("labels", MLP), ("sequences", AUTO), ("labels", f"{AUTO} --layer auto"), ("classes", MLP), ("sequences", MLP)],
)
def test_other_test_rows_change_nothing_that_is_fitted(what, words, fit):
    rows = rows_for(what)
    is_blind = what == "sequences"
    assert differing(fit(rows, words, is_blind), fit(other_rows(rows, what), words, is_blind)) == set()
    assert differing(fit(rows, words, is_blind), fit(other_rows(rows, what, site="b"), words, is_blind))  # broken twin


# --- two that labels cannot show ------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("is_leaky", [False, True])
def test_folds_of_an_ensemble_cut_no_group(is_leaky, fit, seen, monkeypatch):
    made = []
    original = ensemble.make_folds
    monkeypatch.setattr(ensemble, "make_folds", lambda *args: made.append(original(*args)) or made[-1])
    if is_leaky:
        monkeypatch.setattr(steps, "held_out_values", lambda *args: None)
    fit(make_rows(), f"{AUTO} --split group:family")
    family = np.array([*seen["train"]["family"], *seen["validation"]["family"]])
    sides = [{*family[fold]} for fold in made[0][1:]]
    cut = [one & other for i, one in enumerate(sides) for other in sides[:i]]
    assert any(cut) == is_leaky


@pytest.mark.parametrize("is_leaky", [False, True])
def test_no_near_copy_of_a_tested_row_is_trained_on(is_leaky, monkeypatch):
    generator = np.random.default_rng(0)
    first = ["".join(LETTERS[generator.integers(0, 20, 30)]) for _ in range(20)]
    rows = pd.DataFrame({"sequence": [one[:i] + "A" + one[i + 1 :] for one in first for i in range(4)]})
    args, data = as_rows({"split": "cluster", "fold": ("4", "1")}, rows)
    if is_leaky:
        monkeypatch.setattr(splits, "find_whole", lambda data, args: np.arange(len(data)))
    found, _ = splits.split_rows(data, args)
    for asked, known in (("test", "train"), ("test", "validation"), ("validation", "train")):
        nearest = nearest_identities(found[asked]["sequence"][:], found[known]["sequence"][:])
        assert (nearest >= 0.8).any() == is_leaky
