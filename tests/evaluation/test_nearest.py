"""Nearest neighbours: by hand, the number chosen on validation, twins first; and what features of length 1 compare."""

from __future__ import annotations

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import nearest
from hf_ext.evaluation.nearest import NearestBaseline
from hf_ext.evaluation.sequence_features import SequenceFeatures


def at(*degrees: float) -> np.ndarray:
    """Rows of length 1; two of them are as similar as the cosine of their angle."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_two_neighbours_by_hand_weighted_by_closeness() -> None:
    # From 0 degrees: cosines 1/2 and 0, so weights 1 / 0.5 = 2 and 1 / 1 = 1: (2 * 3 + 1 * 9) / 3 = 5.
    fitted = NearestBaseline(counts=[2]).fit(at(60, 90, 180), [3.0, 9.0, 100.0], at(0), [5.0])
    assert fitted.predict(at(0))[0] == pytest.approx(5.0, abs=1e-4)
    assert fitted.validation_rmse[2] == pytest.approx(0.0, abs=1e-4)


def test_a_row_with_an_equal_twin_is_predicted_from_it() -> None:
    fitted = NearestBaseline(counts=[3]).fit(at(0, 10, 20), [1.0, 50.0, 90.0], at(0), [1.0])
    assert fitted.predict(at(0))[0] == pytest.approx(1.0, abs=0.05)


def test_the_number_of_neighbours_is_the_one_that_predicts_validation_best() -> None:
    generator = np.random.default_rng(0)
    angles = generator.uniform(0, 90, (2, 400))
    smooth = [np.sin(np.radians(one)) for one in angles]
    noise = generator.normal(0, 1.0, 400)
    many = NearestBaseline().fit(at(*angles[0]), smooth[0] + noise, at(*angles[1]), smooth[1])
    # Neighbours that alternate: each further one pulls away from the nearest, which is right.
    places, rough = 0.9 * np.arange(100), np.arange(100.0) % 2
    one = NearestBaseline().fit(at(*places), rough, at(*(places + 0.1)), rough)
    assert many.count == 64
    assert one.count == 1
    assert one.validation_rmse[1] == pytest.approx(0.0, abs=1e-9)
    assert one.summary()["num_neighbours"] == one.count


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    angles, labels = np.random.default_rng(0).uniform(0, 90, (2, 50)), np.arange(50.0)
    whole = NearestBaseline().fit(at(*angles[0]), labels, at(*angles[1]), labels).predict(at(*angles[1]))
    monkeypatch.setattr(nearest, "CHUNK_PAIRS", 120)
    pieces = NearestBaseline().fit(at(*angles[0]), labels, at(*angles[1]), labels).predict(at(*angles[1]))
    np.testing.assert_allclose(whole, pieces, atol=1e-5)


def test_fewer_rows_than_neighbours_are_all_taken() -> None:
    fitted = NearestBaseline(counts=[8]).fit(at(60, 300), [1.0, 3.0], at(0), [2.0])
    assert fitted.predict(at(0))[0] == pytest.approx(2.0, abs=1e-4)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"counts=\[0\]"):
        NearestBaseline(counts=[0])
    with pytest.raises(ArgumentError, match="before fit"):
        NearestBaseline().predict(at(0))
    with pytest.raises(DataError, match="2 rows of features for 1 training targets"):
        NearestBaseline().fit(at(0, 1), [1.0], at(0), [1.0])


def test_the_product_of_two_directions_is_the_share_of_equal_residues_that_vary() -> None:
    # G at the second place is in every row and does not count: of three places two, one and none are equal.
    features = SequenceFeatures([["AGAA", "AGAC", "AGCC", "CGCC"]])
    rows = features.directions([["AGAA", "AGAC", "AGCC", "CGCC"]])
    assert (rows @ rows.T)[0] == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-6)


def test_every_column_has_the_same_share_in_a_direction() -> None:
    features = SequenceFeatures([["AA", "CC"], ["ACDEFGH", "DEFGHIK"]])
    rows = features.directions([["AA", "AA"], ["ACDEFGH", "DEFGHIK"]])
    assert (rows @ rows.T)[0] == pytest.approx([1, 1 / 2], abs=1e-6)
