"""A discriminator is loaded with its record, and what speaks against it is said before its numbers."""

import json

import numpy as np
import pytest
from antibody_examples import antibodies, heavy, light

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.affinities import judge_affinities
from hf_ext.generation.judging.discriminator import Discriminator, Trust, examine_record, find_roles, read_record
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.judging.scores import Sampling


def by_row(num: int) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", range(num)))


def test_columns_are_told_by_their_names():
    assert find_roles(["heavy", "light", "antigen"]) == {"heavy": "heavy", "light": "light", "antigen": "antigen"}
    found = find_roles(["antibody_heavy", "antibody_light", "antigen_sequence"])
    assert [*found.values()] == ["heavy", "light", "antigen"]
    assert find_roles(["VH", "target"]) == {"VH": "heavy", "target": "antigen"}
    assert find_roles(["a", "antigen"], {"a": "heavy"}) == {"a": "heavy", "antigen": "antigen"}


@pytest.mark.parametrize(
    ("columns", "given", "words"),
    [
        (["sequence", "antigen"], None, "what sequence stands for is not clear"),
        (["heavy", "vh"], None, "what heavy, vh stands for"),
        (["heavy"], {"havy": "heavy"}, "'havy': 'heavy'.*the model reads heavy"),
        (["heavy"], {"heavy": "H"}, "one of heavy, light, antigen"),
    ],
)
def test_columns_that_are_not_clear_are_refused(columns, given, words):
    with pytest.raises(ArgumentError, match=words):
        find_roles(columns, given)


def record(outcome: str = "better", text: str = "Better than every baseline.") -> dict:
    return {"verdict": {"outcome": outcome, "text": text}, "labels": {"test": {"std": 1.2}}}


def test_a_good_record_and_new_antigens_leave_no_doubt():
    trust = examine_record(record(), ["X"], ["Y", "Z"])
    assert trust == Trust((), 1.2)
    assert trust.is_trusted


@pytest.mark.parametrize(
    ("one", "seen", "doubt"),
    [
        (None, ["Y"], "what it is worth is not known"),
        (record("no better", "No better than a constant: RMSE 1.0."), ["Y"], "its own record says: No better than a"),
        (record("undecided", "Not shown."), ["Y"], "its own record says: Not shown."),
        (record(), ["X", "Y"], "it was trained on 1 of these 2 antigens"),
        (record(), None, "whether it was trained on these antigens is not known"),
    ],
)
def test_what_speaks_against_a_discriminator_is_a_doubt(one, seen, doubt):
    trust = examine_record(one, ["X", "W"], seen)
    assert not trust.is_trusted
    assert [text for text in trust.doubts if text.startswith(doubt)]


def test_shares_count_outputs_that_cannot_be_predicted_as_below():
    found = judge_affinities([8.0, 7.0, 6.9, np.nan], by_row(4), trust=Trust())
    assert (found.share_above["value"], found.mean["n"], found.num_refused) == (0.5, 3, 1)
    assert found.correlation is None
    assert found.is_trusted


def test_correlation_is_between_what_was_asked_for_and_what_is_predicted():
    asked = np.arange(40) / 10
    score = judge_affinities(asked**3, by_row(40), trust=Trust(), asked=asked).correlation
    assert (score["value"], score["low"]) == pytest.approx((1.0, 1.0))
    assert score["interval_by"] == "antigen"
    backwards = judge_affinities(-asked, by_row(40), trust=Trust(), asked=asked).correlation
    assert backwards["value"] == pytest.approx(-1.0)
    same = judge_affinities(np.full(40, 7.0), by_row(40), trust=Trust(), asked=asked).correlation
    assert same["value"] is None
    with pytest.raises(DataError, match="3 asked-for affinities for 40"):
        judge_affinities(asked, by_row(40), trust=Trust(), asked=[1.0, 2.0, 3.0])


def test_predictions_that_are_nearly_all_equal_are_a_collapsed_discriminator():
    generator = np.random.default_rng(0)
    flat = 7.4 + generator.normal(0, 0.01, 50)
    found = judge_affinities(flat, by_row(50), trust=Trust())
    assert found.share_above["value"] == 1.0
    assert found.doubts[0].startswith("it has collapsed: 50 predictions all lie about 7.40")
    # Outputs that are all good are no collapse, where it says other things of other antibodies.
    others = {"random residues": generator.normal(5, 0.1, 50)}
    assert judge_affinities(flat, by_row(50), trust=Trust(), others=others).is_trusted
    # What is little depends on the labels it was trained on.
    assert not judge_affinities(flat * 10, by_row(50), trust=Trust(label_std=20.0)).is_trusted
    assert judge_affinities(generator.normal(7, 0.1, 50), by_row(50), trust=Trust(label_std=0.5)).is_trusted


def test_a_folder_with_its_record_predicts_what_it_can_read(make_affinity, tmp_path):
    model, collator = make_affinity()
    model.save_pretrained(tmp_path)
    collator.save_pretrained(tmp_path)
    assert read_record(tmp_path) is None
    (tmp_path / "all_results.json").write_text(json.dumps(record()))
    judge = Discriminator.from_pretrained(tmp_path, device="cpu")
    assert judge.record == record()
    good = antibodies(3, ["MKTAYIAK"])
    rows = AntibodyRows.of_columns(
        [*good.heavy, "A*A", "", heavy("ARDY")], [*good.light, light(), light(), None], ["MKTAYIAK"] * 6
    )
    found = judge.predict(rows)
    assert np.isfinite(found).tolist() == [True, True, True, False, False, False]
    expected = judge.predictor.predict(
        {"heavy": list(good.heavy), "light": list(good.light), "antigen": ["MKTAYIAK"] * 3}
    )
    assert found[:3] == pytest.approx(expected)
    (tmp_path / "all_results.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"all_results\.json: damaged"):
        read_record(tmp_path)
