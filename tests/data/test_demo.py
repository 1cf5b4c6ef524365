import numpy as np
import pytest

from hf_ext.data.demo import NUM_ROWS, make_demo_table
from hf_ext.data.proteins import STANDARD


@pytest.fixture(scope="module")
def table():
    return make_demo_table()


def count(text, letters):
    return sum(letter in letters for letter in text)


def test_the_table_has_the_chains_it_states_and_follows_from_its_seed(table):
    assert table.column_names == ["heavy", "light", "antigen", "pKd"]
    assert len(table) == NUM_ROWS == 3000
    distinct = {name: len(set(table[name][:])) for name in ("heavy", "light", "antigen")}
    assert (distinct["heavy"], distinct["light"]) == (300, 40)
    assert 390 <= distinct["antigen"] <= 400
    assert set("".join(table["heavy"][:])) == set(STANDARD)
    assert table.to_dict() == make_demo_table().to_dict()
    assert table["pKd"][:5] != make_demo_table(seed=1)["pKd"][:5]


def planted_features(row):
    heavy, light, epitope = row["heavy"][-25:-11], row["light"][-18:-10], row["antigen"][-36:-22]
    charges = [count(text, "KR") - count(text, "DE") for text in (heavy, epitope)]
    return count(heavy, "FWY"), charges[0] * charges[1], count(light, "P"), count(epitope, "ILVM")


def test_labels_are_the_planted_rule_plus_noise_of_a_quarter(table):
    features = np.array([planted_features(row) for row in table], float)
    labels, signal = np.array(table["pKd"][:]), features @ [0.6, -0.25, -0.5, 0.2]
    assert np.corrcoef(signal, labels)[0, 1] > 0.97
    assert abs(np.corrcoef(signal, np.random.default_rng(0).permutation(labels))[0, 1]) < 0.1  # not of shuffled ones
    coefficients, residual, *_ = np.linalg.lstsq(np.column_stack([features, np.ones(len(labels))]), labels)
    assert np.sqrt(residual[0] / len(labels)) == pytest.approx(0.25, abs=0.01)
    relative = (coefficients[:4] / coefficients[0]).tolist()
    assert relative == pytest.approx([1.0, -0.25 / 0.6, -0.5 / 0.6, 0.2 / 0.6], abs=0.05)
    assert labels.mean() == pytest.approx(7.5, abs=0.02)
    assert labels.std() == pytest.approx(np.hypot(1.2, 0.25), abs=0.03)
