"""Generated samples: made once, never believed when damaged; their units, grids and trivial errors, by hand."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hf_ext.pde.data import SPLITS, TASKS, baseline_errors, load_task, measure_units
from hf_ext.pde.solvers import make_advection

SMALL = {"resolution": 8, "seed": 0}


def load(cache_dir, name="darcy2d", split="train", num=3, **given):
    return load_task(name, split, num, cache_dir=cache_dir, **{**SMALL, **given})


def are_equal(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[kind], other[kind]) for kind in one)


def means(name, train, test):
    return {kind: errors.mean() for kind, errors in baseline_errors(name, train, test).items()}


@pytest.mark.parametrize("name", TASKS)
def test_samples_have_the_shapes_that_tasks_say(name):
    found = load(None, name, resolution=16)
    assert found["inputs"].shape == (3, *TASKS[name].input_shape(16))
    assert found["targets"].shape == (3, *TASKS[name].target_shape(16))
    assert found["targets"][0].size == len(TASKS[name].query_grid(16)) == 256


def test_query_grids_by_hand():
    x_t = TASKS["advection1d"].query_grid(4)
    assert x_t[:5].tolist() == [[0, 0.25], [0.25, 0.25], [0.5, 0.25], [0.75, 0.25], [0, 0.5]]
    assert x_t[-1].tolist() == [0.75, 1.0]
    x_y = TASKS["darcy2d"].query_grid(2)
    assert x_y.tolist() == [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]


def test_splits_share_no_sample():
    inputs = np.concatenate([load(None, "advection1d", split, 50)["inputs"] for split in SPLITS])
    assert len(np.unique(inputs.round(4), axis=0)) == 150


def test_advection_has_the_speed_and_the_times_that_the_task_says():
    inputs, targets = make_advection(3, points=16, times=4, beta=0.4, seed=0, stream=SPLITS.index("test"))
    assert are_equal(load(None, "advection1d", "test"), {"inputs": inputs, "targets": targets})


@pytest.mark.parametrize("name", TASKS)
def test_what_is_read_again_is_what_was_made(tmp_path, name, caplog):
    fresh = load(None, name)
    made = load(tmp_path, name)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert are_equal(fresh, made)
    assert are_equal(fresh, load(tmp_path, name))
    assert file.stat().st_mtime_ns == written
    assert not caplog.records


@pytest.mark.parametrize("given", [{"num": 4}, {"seed": 1}, {"resolution": 12}, {"split": "test"}])
def test_other_samples_have_another_file(tmp_path, given):
    load(tmp_path)
    assert are_equal(load(tmp_path, **given), load(None, **given))
    assert len([*tmp_path.iterdir()]) == 2


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "bit": flip_a_bit,
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("no samples"),
    "fewer": lambda file: np.savez(file, inputs=np.zeros(2)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_said_and_made_anew(tmp_path, damage, caplog):
    fresh = load(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    DAMAGES[damage](file)
    assert are_equal(fresh, load(tmp_path))
    assert "made anew" in caplog.text
    assert str(file) in caplog.text
    assert file.read_bytes() == content
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_that_cannot_be_made_is_said_and_samples_are_used(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    with caplog.at_level(logging.WARNING):
        assert are_equal(load(tmp_path / "taken" / "cache"), load(None))
    assert "cannot be kept" in caplog.text


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    load(tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert are_equal(load(tmp_path), load(None))


def test_many_who_ask_at_once_get_the_same(tmp_path, caplog):
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: load(tmp_path), range(6))]
    assert all(are_equal(found[0], other) for other in found[1:])
    assert len([*tmp_path.iterdir()]) == 1
    assert not caplog.records


def test_units_by_hand():
    train = {"darcy2d": {"inputs": np.array([[3.0, 12.0], [12.0, 3.0]]), "targets": np.array([[2.0, 2.0], [2.0, 2.0]])}}
    assert measure_units(train) == {
        "input_means": {"darcy2d": 7.5},
        "input_stds": {"darcy2d": 4.5},
        "target_means": {"darcy2d": 2.0},
        "target_stds": {"darcy2d": 1.0},  # nothing to divide by
    }


def test_trivial_errors_by_hand():
    """The mean of the training targets is 2: |2 - 4| / 4 and |2 - 1| / 1. The initial state is 3: 1/4 and 2/1."""
    train = {"inputs": np.zeros((2, 1)), "targets": np.array([[[1.0]], [[3.0]]])}
    test = {"inputs": np.full((2, 1), 3.0), "targets": np.array([[[4.0]], [[1.0]]])}
    assert means("advection1d", train, test) == {"training mean": 0.75, "persistence": 1.125}
    assert means("darcy2d", train, test) == {"training mean": 0.75}


def test_trivial_errors_of_what_is_generated():
    """Advection: states of mean 0, and waves that have moved away. Darcy flow: media differ by a quarter."""
    found = {name: means(name, load(None, name, num=400), load(None, name, "test", 200)) for name in TASKS}
    assert found["advection1d"]["training mean"] == pytest.approx(1.0, abs=0.05)
    assert found["advection1d"]["persistence"] > 1.2
    assert found["darcy2d"]["training mean"] == pytest.approx(0.25, abs=0.03)
