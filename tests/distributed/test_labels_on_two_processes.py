"""Two processes train and predict every kind of label as one does, with rows and known labels that do not divide."""

import numpy as np
import pytest
from equal_cases import write_encoders
from labels_on_ranks import CASES, PER_RANK, train
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("labels")
    write_encoders(made / "encoders")
    run_on_ranks(HELPERS / "labels_on_ranks.py", made)
    return made


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_and_predict_as_one(case, folder):
    train(case, folder, str(folder / "encoders" / "esm"))
    one, *two = (np.load(folder / f"{case}-{name}.npz") for name in ("1-0", "2-0", "2-1"))
    for found in two:
        np.testing.assert_allclose(found["weights"], one["weights"], atol=2e-5)
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-4)
        assert found["loss"] == pytest.approx(one["loss"].item(), rel=1e-4)
        assert found["predictions"].shape == one["predictions"].shape
        np.testing.assert_allclose(found["predictions"], one["predictions"], atol=1e-3)


def test_a_twin_whose_processes_count_by_themselves_is_told_apart(folder):
    right, broken = (np.load(folder / f"{case}-2-0.npz") for case in ("residue_classes", PER_RANK))
    assert abs(right["weights"] - broken["weights"]).max() > 1e-4
