"""A discriminator is loaded with its record, and what speaks against it is said before its numbers."""

import json

import numpy as np
import pytest
from antibody_examples import antibodies, heavy, light

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.discriminator import Discriminator, find_doubts, find_roles, judge_affinities
from hf_ext.generation.judging.rows import AntibodyRows, Sampling

ANTIGEN = "MKTAYIAK"


def by_row(num: int) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", range(num)))


def record(outcome: str = "better", text: str = "Better than every baseline.", std: float = 1.2) -> dict:
    return {"verdict": {"outcome": outcome, "text": text}, "labels": {"test": {"std": std}}}


def test_columns_are_told_by_their_names():
    found = find_roles(["antibody_heavy", "Antibody-Light", "antigen sequence"])
    assert [*found.values()] == ["heavy", "light", "antigen"]
    assert find_roles(["VH", "target"]) == {"VH": "heavy", "target": "antigen"}
    for columns in (["sequence", "antigen"], ["heavy", "vh"], ["heavy_light"]):
        with pytest.raises(ArgumentError, match=f"reads {', '.join(columns)}: which of them is the heavy chain"):
            find_roles(columns)


@pytest.mark.parametrize(
    ("one", "doubts"),
    [
        (record(), []),
        (None, ["what it is worth is not known: no verdict of its own test is beside it"]),
        (record("no better", "No better than a constant.\nMore."), ["its own record says: No better than a constant."]),
        (record("undecided", "Not shown."), ["its own record says: Not shown."]),
    ],
)
def test_what_its_record_says_against_a_discriminator_is_a_doubt(one, doubts):
    assert find_doubts(one) == doubts


def test_predictions_that_are_nearly_all_equal_are_a_collapsed_discriminator():
    generator = np.random.default_rng(0)
    flat = 7.4 + generator.normal(0, 0.01, 50)
    (doubt,) = find_doubts(record(), flat)
    assert doubt.startswith("it has collapsed: 50 predictions all lie about 7.40")
    # Outputs that are all good are no collapse, where it says other things of other antibodies.
    assert not find_doubts(record(), np.concatenate([flat, generator.normal(5, 0.1, 50)]))
    # What is little depends on the labels it was trained on.
    assert find_doubts(record(std=20.0), flat * 10)
    assert not find_doubts(record(std=0.5), generator.normal(7, 0.1, 50))
    assert find_doubts(record(), np.full(3, np.nan)) == ["it could read none of the outputs"]


def test_shares_count_outputs_that_cannot_be_predicted_as_below():
    found = judge_affinities(np.array([8.0, 7.0, 6.9, np.nan]), by_row(4))
    assert (found["share_above"]["value"], found["mean"]["n"], found["num_refused"]) == (0.5, 3, 1)
    assert found["correlation"] is None


def test_correlation_is_between_what_was_asked_for_and_what_is_predicted():
    asked = np.arange(40) / 10
    score = judge_affinities(asked**3, by_row(40), asked=asked)["correlation"]
    assert (score["value"], score["low"]) == pytest.approx((1.0, 1.0))
    assert score["interval_by"] == "antigen"
    assert judge_affinities(-asked, by_row(40), asked=asked)["correlation"]["value"] == pytest.approx(-1.0)
    assert judge_affinities(np.full(40, 7.0), by_row(40), asked=asked)["correlation"]["value"] is None
    with pytest.raises(DataError, match="40 predictions for 3"):
        judge_affinities(asked, by_row(40), asked=[1.0, 2.0, 3.0])


def test_a_folder_with_its_record_predicts_what_it_can_read(make_affinity, tmp_path):
    model, collator = make_affinity()
    model.save_pretrained(tmp_path)
    collator.save_pretrained(tmp_path)
    assert Discriminator.from_pretrained(tmp_path, device="cpu").record is None
    (tmp_path / "all_results.json").write_text(json.dumps(record()))
    judge = Discriminator.from_pretrained(tmp_path, device="cpu")
    assert judge.record == record()
    good = antibodies(3, [ANTIGEN])
    chains = [*good.heavy, "A*A", "", heavy("ARDY")], [*good.light, light(), light(), None]
    found = judge.predict(AntibodyRows.of_columns(*chains, [ANTIGEN] * 6))
    assert np.isfinite(found).tolist() == [True, True, True, False, False, False]
    expected = judge.predictor.predict({"heavy": good.heavy, "light": good.light, "antigen": [ANTIGEN] * 3})
    assert found[:3] == pytest.approx(expected)
    (tmp_path / "all_results.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"all_results\.json: damaged"):
        Discriminator.from_pretrained(tmp_path, device="cpu")
