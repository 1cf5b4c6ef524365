"""HDF5 files in PDEBench's layout: what is read from them, a run on them, and files that are something else."""

import h5py
import numpy as np
import pytest
import train
from pde_operator.data import load_file, make_advection, make_darcy

from hf_ext.errors import ArgumentError, DataError

COUNTS = {"train": 5, "validation": 2, "test": 3}
SMALL = ["--resolution", "16", "--num_train_samples", "6", "--num_eval_samples", "2", "--hidden_size", "16"]
SMALL += ["--num_hidden_layers", "1", "--num_attention_heads", "2", "--per_device_train_batch_size", "4"]
SMALL += ["--max_steps", "2", "--save_strategy", "no", "--eval_strategy", "no", "--physics_every", "1"]


def write_advection(path, speed=0.4, num=12):
    """201 states at 0, 0.01, ..., 2 of 256 points, and 202 times, as PDEBench has it."""
    first, later = make_advection(num, points=256, times=200, beta=2 * speed, seed=0)
    with h5py.File(path, "w") as file:
        file["tensor"] = np.concatenate([first[:, None], later], axis=1)
        file["t-coordinate"] = np.arange(202) / 100
        file["x-coordinate"] = (np.arange(256) + 0.5) / 256
    return str(path)


def write_darcy(path, source=1.0, num=12):
    permeability, pressure = make_darcy(num, resolution=32, seed=0)
    with h5py.File(path, "w") as file:
        file["nu"] = permeability
        file["tensor"] = source * pressure[:, None]
    return str(path)


def test_splits_are_the_first_and_the_last_samples_at_the_grid_of_the_task(tmp_path):
    task, samples = load_file(write_advection(tmp_path / "a.hdf5"), COUNTS, resolution=16)
    assert task == "advection1d"
    first, later = make_advection(12, points=64, times=4, seed=0)
    for split, rows in (("train", slice(0, 5)), ("validation", slice(5, 7)), ("test", slice(9, 12))):
        np.testing.assert_allclose(samples[split]["inputs"], first[rows], atol=1e-5)
        np.testing.assert_allclose(samples[split]["targets"], later[rows], atol=1e-5)
    task, samples = load_file(write_darcy(tmp_path / "d.hdf5"), COUNTS, resolution=16)
    assert task == "darcy2d"
    fine = make_darcy(12, resolution=32, seed=0)[1][9]
    means = (fine[::2, ::2] + fine[1::2, ::2] + fine[::2, 1::2] + fine[1::2, 1::2]) / 4
    np.testing.assert_allclose(samples["test"]["targets"][0], means, rtol=1e-5)


def test_a_run_trains_and_scores_on_both_files(tmp_path):
    files = [write_darcy(tmp_path / "d.hdf5"), write_advection(tmp_path / "a.hdf5")]
    words = [*SMALL, "--dataset_name", *files, "--output_dir", str(tmp_path / "run")]
    results = train.main(words)
    assert results["data"]["source"] == ", ".join(files)
    assert results["data"]["sizes"] == {"train": 6, "validation": 2, "test": 2}
    assert results["test"]["scores"]["model"].keys() == {"advection1d_nrmse", "darcy2d_nrmse", "nrmse"}


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "text.hdf5").write_text("no HDF5")
    with h5py.File(tmp_path / "burgers.hdf5", "w") as file:
        file["data"] = np.zeros((3, 4))
    advection = write_advection(tmp_path / "a.hdf5")
    for path, resolution, counts, words in (
        (tmp_path / "nowhere.hdf5", 16, COUNTS, "there is no such file"),
        (tmp_path / "text.hdf5", 16, COUNTS, "cannot be read as HDF5"),
        (tmp_path / "burgers.hdf5", 16, COUNTS, r"It holds data \(3, 4\)"),
        (advection, 16, {**COUNTS, "train": 50}, "has 12 samples, asked for are 50 for train"),
        (advection, 24, COUNTS, "has 256 points, which is no multiple of the 144"),
    ):
        with pytest.raises(DataError, match=words):
            load_file(str(path), counts, resolution)


def test_files_of_other_tasks_or_of_another_equation_are_refused(tmp_path):
    fast = write_advection(tmp_path / "fast.hdf5", speed=1.0)
    strong = write_darcy(tmp_path / "strong.hdf5", source=10.0)
    for words, message in (
        ([fast], "give --tasks advection1d"),
        ([fast, "--tasks", "advection1d"], "give --physics_every 0"),
        ([strong, "--tasks", "darcy2d"], "give --physics_every 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            train.main([*SMALL, "--output_dir", str(tmp_path / "run"), "--dataset_name", *words])
