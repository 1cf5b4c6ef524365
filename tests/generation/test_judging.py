"""What outputs are worth: valid, new, distinct, read from their antigen, believed by a discriminator; and the gates."""

import json

import numpy as np
import pytest
import torch
from antibody_examples import HEAVY_V, KAPPA_CONSTANT, LIGHT_CDR3, antibodies, heavy, light, random_antigens

from hf_ext.errors import ArgumentError, DataError, MissingDependencyError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.baselines import RETRIEVAL, SHUFFLED, make_baselines
from hf_ext.generation.judging.conditions import judge_condition, shuffle_affinities, shuffle_antigens
from hf_ext.generation.judging.copies import judge_diversity, judge_novelty, judge_recovery
from hf_ext.generation.judging.discriminator import Discriminator, find_doubts, find_roles, judge_affinities
from hf_ext.generation.judging.gates import REQUIREMENTS, check_gates, have_passed, write_gates
from hf_ext.generation.judging.numbering import Numberer
from hf_ext.generation.judging.rows import AntibodyRows, Sampling, compare_means, mean_score
from hf_ext.generation.judging.validity import (
    Humanness,
    find_cdr3,
    find_problems,
    find_structure_problems,
    judge_validity,
)
from hf_ext.optional import import_problem


def by_antigen(values) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", values))


def test_rows_without_a_value_are_left_out_and_counted_out():
    score = mean_score([1.0, np.nan, 3.0], by_antigen(["a", "b", "c"]))
    assert (score["value"], score["n"], score["num_units"]) == (2.0, 2, 2)
    assert mean_score([np.nan], by_antigen(["a"]))["undefined"] == "no row has a value"
    compared = compare_means([1.0, np.nan, 3.0], [2.0, 5.0, np.nan], by_antigen(["a", "b", "c"]))
    assert (compared.n, compared.improvement) == (1, 1.0)
    assert compare_means([np.nan], [1.0], by_antigen(["a"])).improvement is None


def test_few_units_are_not_trusted_and_a_lower_loss_is_weighted_by_tokens():
    better = compare_means(np.zeros(5), np.ones(5), by_antigen(range(5)))
    assert (better.improvement, better.low, better.is_better) == (1.0, 1.0, False)
    assert compare_means(np.zeros(10), np.ones(10), by_antigen(range(10))).is_better
    found = compare_means([20.0, 60.0], [10.0, 60.0], by_antigen(["a", "b"]), num_tokens=[10, 30])
    assert (found.before, found.after, found.improvement) == (2.0, 1.75, 0.25)


def test_shuffled_antigens_are_a_derangement_of_the_distinct_ones():
    antigens = ["a", "b", "a", "c", "d", "e"] * 3
    for seed in range(20):
        shuffled = shuffle_antigens(antigens, seed)
        other = dict(zip(antigens, shuffled))
        assert all(old != new for old, new in other.items())
        assert sorted(other.values()) == sorted(other)
        assert [other[one] for one in antigens] == shuffled  # one for all rows of an antigen
    assert shuffle_antigens(antigens, 1) == shuffle_antigens(antigens, 1)
    assert len({tuple(shuffle_antigens(antigens, seed)) for seed in range(20)}) > 5
    with pytest.raises(DataError, match=r"2 rows of 1 antigen"):
        shuffle_antigens(["a", "a"])


def test_a_shuffled_antigen_is_of_another_cluster_where_that_can_be():
    antigens, clusters = list("abcdef"), [0, 0, 0, 1, 2, 2]
    group = dict(zip(antigens, clusters))
    for seed in range(20):
        assert all(group[old] != group[new] for old, new in zip(antigens, shuffle_antigens(antigens, seed, clusters)))
    assert all(old != new for old, new in zip("abcde", shuffle_antigens("abcde", 0, [0, 0, 0, 0, 1])))


def test_shuffled_affinities_are_those_of_the_other_half():
    shuffled = shuffle_affinities([5.0, 6.0, np.nan, 8.0, 9.0])
    assert np.isnan(shuffled[2])
    assert [shuffled[i] for i in (0, 1, 3, 4)] == [8.0, 9.0, 5.0, 6.0]
    with pytest.raises(DataError, match="fewer than two distinct"):
        shuffle_affinities([7.0, 7.0, np.nan])


def losses(effect: float, num_antigens: int = 30, num_rows: int = 5):
    """Token losses of rows whose own noise is far larger than that of a pair."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(200, 250, num_antigens * num_rows)
    true = tokens * generator.uniform(0.5, 1.5, len(tokens))
    shuffled = true + tokens * (effect + generator.normal(0, 0.01, len(tokens)))
    return tokens, true, shuffled, by_antigen(np.repeat(range(num_antigens), num_rows))


def test_a_loss_that_rises_with_another_antigen_means_it_is_read_and_else_it_is_ignored():
    found = judge_condition("antigen", *losses(0.05))
    assert found.reading == "reads"
    assert found.comparison.improvement == pytest.approx(0.05, abs=0.003)
    assert found.text.startswith("reads the antigen: shuffling it costs 0.0")
    for effect in (0.0, -0.05):
        assert judge_condition("antigen", *losses(effect)).text.startswith("ignores the antigen")
    few = judge_condition("antigen", *losses(0.05, num_antigens=4, num_rows=20))
    assert few.reading == "undecided"
    assert "too few units" in few.text
    with pytest.raises(DataError, match=r"1 shuffled losses are not finite \(first: row 1\)"):
        judge_condition("pKd", [1, 1], [1.0, 1.0], [1.0, np.nan], by_antigen("ab"))


def rows_of(cdr3s: list[str | None], antigens: list[str]) -> AntibodyRows:
    chains = ["AAAA" if one is None else heavy(one) for one in cdr3s]
    return AntibodyRows.of_columns(chains, [light()] * len(chains), antigens)


def test_diversity_is_distinct_outputs_and_identity_within_an_antigen_and_across():
    rows = rows_of(["ARDY", "ARDY", "ARDY", "AKEL"], ["a", "b", "c", "d"])
    found = judge_diversity(rows, by_antigen(rows.antigens))
    assert found["num_distinct"] == 2
    assert found["unique_pairs"]["value"] == found["unique_cdr3"]["value"] == pytest.approx(0.5)
    rows = rows_of(["A" * 10, "A" * 10, "D" * 10, "D" * 10], list("aabb"))
    found = judge_diversity(rows, by_antigen(rows.antigens))
    assert found["identity_within"]["value"] == 1.0
    assert found["identity_across"]["value"] == pytest.approx(1 - 10 / len(heavy("A" * 10)))


def test_copies_near_copies_and_new_outputs_are_counted():
    training = antibodies(30, random_antigens(5))
    copy, near, new = training.heavy[3], training.heavy[4].replace("VESGG", "VESAG"), heavy("ARWWWWWWWWWWWWWWWWWW")
    rows = AntibodyRows.of_columns([copy, copy, near, new], [light(), light("QQ"), light(), light()], list("abcd"))
    found, by_row = judge_novelty(rows, training, by_antigen(rows.antigens))
    assert found["memorised"]["value"] == 0.25  # a copied heavy chain with another light one is none
    assert by_row["is_copy"].tolist() == [True, False, False, False]
    assert found["near_copies"]["value"] == 0.5
    assert found["memorised_cdr3"]["value"] == 0.75
    assert by_row["nearest_heavy"][:3] == pytest.approx(np.array([1, 1, 1 - 1 / len(near)]))
    assert by_row["nearest_heavy"][3] < 0.9


def test_recovery_is_identity_to_the_most_alike_binder_of_the_antigen():
    held_out = rows_of(["ARDY", "ARDYEL", "AKEL", None], ["a", "a", "b", "c"])
    rows = rows_of(["ARDYEM", "AKEL", None, "ARDY", "ARDY"], ["a", "a", "a", "c", "unknown"])
    found = judge_recovery(rows, held_out)
    assert found["cdr3"][:3].tolist() == pytest.approx([5 / 6, 1 / 2, 0])  # ARDYEL is 3 edits of 6 from AKEL
    assert np.isnan(found["cdr3"][3:]).all()  # no binder with a CDR3; no binder at all
    assert found["light"][:4].tolist() == [1.0] * 4
    assert found["heavy"][3] < 0.1  # the binder of c is AAAA


def test_retrieval_takes_an_antibody_of_the_most_similar_training_antigen():
    known = random_antigens(6, size=80)
    training = antibodies(30, known)
    asked = [known[2][:60] + known[5][:15], known[4][5:], known[2]]
    rows = make_baselines(asked * 10, training)[RETRIEVAL]
    for pair, antigen in zip(rows.pairs, rows.antigens):
        expected = known[2] if antigen in (asked[0], asked[2]) else known[4]
        assert expected in [training.antigens[i] for i, one in enumerate(training.pairs) if one == pair]


def test_shuffled_antibodies_are_training_pairs_drawn_without_replacement():
    training = antibodies(30, random_antigens(6))
    rows = make_baselines(["x"] * 30, training)[SHUFFLED]
    assert sorted(rows.pairs) == sorted(training.pairs)
    assert rows.pairs != training.pairs
    assert rows.antigens == ("x",) * 30
    assert make_baselines(["x"] * 30, training)[SHUFFLED] == rows
    assert make_baselines(["x"] * 30, training, seed=1)[SHUFFLED] != rows
    with pytest.raises(DataError, match="no training antibodies"):
        make_baselines(["x"], training.select([]))


CDR3 = "ARDRSTYFDY"
each_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(one, marks=pytest.mark.skipif(import_problem(one) is not None, reason=f"{one} is not installed"))
        for one in ("immunum", "anarcii")
    ],
)


def pairs_of(*pairs: tuple[str, str | None]) -> AntibodyRows:
    return AntibodyRows.of_columns([one for one, _ in pairs], [one for _, one in pairs], ["AG"] * len(pairs))


def judge(rows: AntibodyRows, numberer: Numberer | None = None):
    return judge_validity(rows, by_antigen(range(len(rows))), numberer)


def test_form_is_letters_and_chains_and_no_more():
    rows = pairs_of(("ACD", "EFG"), ("AXD", "EFG"), ("", "EFG"), ("ACD", None), ("AAAA", "AAAA"))
    assert find_structure_problems(rows) == [None, "heavy chain with X", "no heavy chain", "no light chain", None]
    assert find_structure_problems(rows, needs_light=False)[3] is None
    malformed = AntibodyRows(("ACD",), ("EFG",), ("AG",), ("two <sep>",))
    assert find_structure_problems(malformed) == find_problems(malformed) == ["two <sep>"]


def test_cdr3_stands_between_the_second_cysteine_and_the_j_motif():
    assert find_cdr3(heavy(CDR3)) == CDR3
    assert find_cdr3(heavy("AKCSGGSCYDY")) == "AKCSGGSCYDY"  # cysteines inside of it
    assert find_cdr3(light(), "light") == LIGHT_CDR3
    assert find_cdr3(light()) is None  # FGxG is no heavy chain's motif
    assert find_cdr3("A" * 120) is None


def test_patterns_pass_a_pair_of_domains_and_nothing_else():
    whole = heavy(CDR3)
    no_heavy = "heavy chain without the pattern Cys-Trp-Cys and WGxG"
    cases = {
        (whole, light()): None,
        (whole, None): None,
        (light(), whole): no_heavy,
        (whole.replace("YYC", "YYS"), light()): no_heavy,
        (whole, light() + KAPPA_CONSTANT): "light chain with more than 10 residues after its variable domain",
        (whole[:60], light()): no_heavy,
        (whole * 2, light()): "heavy chain with more than 10 residues after its variable domain",
        (whole[::-1], light()): no_heavy,
    }
    assert find_problems(pairs_of(*cases), needs_light=False) == [*cases.values()]


def test_without_numbering_nothing_is_called_strict_and_shuffled_residues_pass_by_alphabet_alone():
    rows = antibodies(20, ["AG"])
    found, is_valid = judge(rows)
    assert (found["strict"], found["numbered"], found["motif"]["value"]) == (None, None, 1.0)
    assert is_valid.all()
    shuffled, is_valid = judge(pairs_of(*(("".join(sorted(one)), "".join(sorted(other))) for one, other in rows.pairs)))
    assert (shuffled["well_formed"]["value"], shuffled["motif"]["value"]) == (1.0, 0.0)
    assert not is_valid.any()


@each_library
def test_a_numbered_chain_is_strictly_valid_only_as_one_whole_domain(library):
    whole, long = heavy(CDR3), "ARDRSTYFDYAYSTAMDY"  # 18 residues for the 13 positions of CDR3
    cases = {
        whole: None,
        heavy(long): None,
        whole.replace("GQGT", "GPGT"): None,
        whole[:60]: "heavy chain has nothing at position 104, where C is conserved",
        whole * 2: "heavy chain with 117 residues outside its variable domain",
        whole + "ASTKGPSVFP": None,
        whole + "ASTKGPSVFPL": "heavy chain with 11 residues outside its variable domain",
        whole.replace("YYC", "YYS"): "heavy chain has S at position 104, where C is conserved",
        whole.replace("WGQGT", "FGQGT"): "heavy chain has FGQG for the J motif WGxG",
        light(): "heavy chain is of type K",
        "A" * 120: "heavy chain is not numbered as a variable domain",
    }
    assert find_problems(pairs_of(*((one, light()) for one in cases)), Numberer(library)) == [*cases.values()]
    single, inserted = Numberer(library).number([whole, heavy(long)])
    assert "".join(single.positions.get(place, "") for place in range(105, 118)) == CDR3
    assert "".join(single.positions.get(place, "") for place in range(1, 39)) == HEAVY_V[:33]
    assert inserted.length == 125
    assert "".join(inserted.positions[place] for place in range(105, 118)) == "ARDRSTYSTAMDY"


@each_library
def test_numbering_counts_as_strict_what_is_whole_and_leaves_the_threads_alone(library):
    before = torch.get_num_threads()
    double = (heavy(CDR3) * 2, light())
    rows = pairs_of(*[(heavy(CDR3), light())] * 3, (light(), heavy(CDR3)), (heavy(CDR3), "AXA" * 40), double)
    found, is_valid = judge(rows, Numberer(library))
    assert torch.get_num_threads() == before
    assert is_valid.tolist() == [True, True, True, False, False, False]
    assert found["numbered"]["value"] == pytest.approx(4 / 6)  # two domains in a row are one to the library
    assert (found["strict"]["value"], found["numbered_by"]) == (0.5, library)
    assert found["problems"][:2] == [("heavy chain is of type K", 1), ("light chain with X", 1)]


@pytest.mark.skipif(import_problem("promb") is None, reason="promb is installed here")
def test_humanness_without_its_library_names_the_extra():
    with pytest.raises(MissingDependencyError, match=r"hf_ext\[humanness\]"):
        Humanness()


@pytest.mark.nightly  # loading takes 7 to 30 s and 0.8 GB
@pytest.mark.skipif(import_problem("promb") is not None, reason="the extra 'humanness'")
def test_human_frameworks_are_human_and_shuffled_residues_are_not():
    whole = heavy(CDR3)
    shuffled = "".join(np.random.default_rng(0).permutation([*whole]))
    found = Humanness().score(pairs_of((whole, light()), (shuffled, None), ("ACD", None)))
    assert found[0] > 0.8
    assert found[1:].tolist() == [0.0, 0.0]


def record(outcome: str = "better", text: str = "Better than every baseline.", std: float = 1.2) -> dict:
    return {"verdict": {"outcome": outcome, "text": text}, "labels": {"test": {"std": std}}}


def test_columns_are_told_by_their_names():
    found = find_roles(["antibody_heavy", "Antibody-Light", "antigen sequence"])
    assert [*found.values()] == ["heavy", "light", "antigen"]
    assert find_roles(["VH", "target"]) == {"VH": "heavy", "target": "antigen"}
    for columns in (["sequence", "antigen"], ["heavy", "vh"], ["heavy_light"]):
        with pytest.raises(ArgumentError, match=f"reads {', '.join(columns)}: which of them is the heavy chain"):
            find_roles(columns)


def test_what_its_record_or_its_predictions_say_against_a_discriminator_is_a_doubt():
    assert find_doubts(record()) == []
    assert find_doubts(None) == ["what it is worth is not known: no verdict of its own test is beside it"]
    bad = record("no better", "No better than a constant.\nMore.")
    assert find_doubts(bad) == ["its own record says: No better than a constant."]
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


def test_shares_count_what_cannot_be_predicted_as_below_and_correlation_is_with_what_was_asked_for():
    found = judge_affinities(np.array([8.0, 7.0, 6.9, np.nan]), by_antigen(range(4)))
    assert (found["share_above"]["value"], found["mean"]["n"], found["num_refused"]) == (0.5, 3, 1)
    assert found["correlation"] is None
    asked, units = np.arange(40) / 10, by_antigen(range(40))
    score = judge_affinities(asked**3, units, asked=asked)["correlation"]
    assert (score["value"], score["low"], score["interval_by"]) == (pytest.approx(1.0), pytest.approx(1.0), "antigen")
    assert judge_affinities(-asked, units, asked=asked)["correlation"]["value"] == pytest.approx(-1.0)
    assert judge_affinities(np.full(40, 7.0), units, asked=asked)["correlation"]["value"] is None
    with pytest.raises(DataError, match="40 predictions for 3"):
        judge_affinities(asked, units, asked=[1.0, 2.0, 3.0])


def test_a_folder_with_its_record_predicts_what_it_can_read(make_affinity, tmp_path):
    model, collator = make_affinity()
    model.save_pretrained(tmp_path)
    collator.save_pretrained(tmp_path)
    assert Discriminator.from_pretrained(tmp_path, device="cpu").record is None
    (tmp_path / "all_results.json").write_text(json.dumps(record()))
    judge = Discriminator.from_pretrained(tmp_path, device="cpu")
    assert judge.record == record()
    good = antibodies(3, ["MKTAYIAK"])
    chains = [*good.heavy, "A*A", "", heavy("ARDY")], [*good.light, light(), light(), None]
    found = judge.predict(AntibodyRows.of_columns(*chains, ["MKTAYIAK"] * 6))
    assert np.isfinite(found).tolist() == [True, True, True, False, False, False]
    expected = judge.predictor.predict({"heavy": good.heavy, "light": good.light, "antigen": ["MKTAYIAK"] * 3})
    assert found[:3] == pytest.approx(expected)
    (tmp_path / "all_results.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"all_results\.json: damaged"):
        Discriminator.from_pretrained(tmp_path, device="cpu")


GOOD = {
    1: {"num_errors": 0, "token_loss": 0.1, "reproduced": 0.9, "valid": 0.5},
    2: {"num_validation_falls": 1, "valid": 0.5, "share_above": 0.3, "unique": 0.5},
    3: {"correlation": 0.41, "valid": 0.7, "share_above": 0.5, "beats_random": 0.01},
}
BAD = {
    1: {"num_errors": 1, "token_loss": 0.11, "reproduced": 0.89, "valid": 0.49},
    2: {"num_validation_falls": 0, "valid": 0.49, "share_above": 0.29, "unique": float("nan")},
    3: {"correlation": 0.4, "valid": 0.69, "share_above": None, "beats_random": 0.0},
}


def test_the_specifications_thresholds_decide():
    for stage, good in GOOD.items():
        assert [*good] == [one.name for one in REQUIREMENTS[stage]]
        assert have_passed(check_gates(stage, good))
        for name, value in BAD[stage].items():
            gates = check_gates(stage, {**good, name: value})
            assert [gate.name for gate in gates if not gate.passed] == [name]
            assert not have_passed(gates)
    assert have_passed(check_gates(1, {**GOOD[1], "token_loss": 0.3}, {"token_loss": 0.3}))


def test_a_gate_says_its_value_and_what_is_needed_and_what_was_not_measured_fails():
    gate = check_gates(2, {**GOOD[2], "valid": 0.06})[1]
    assert (gate.value, gate.threshold, gate.passed) == (0.06, 0.5, False)
    assert gate.reason.startswith("0.060; at least 0.500 is needed (share of outputs that are valid")
    numbers = {name: value for name, value in GOOD[2].items() if name != "share_above"}
    missing = check_gates(2, numbers)[2]
    assert (missing.value, missing.passed) == (None, False)
    assert missing.reason.startswith("not measured; ")
    gates = check_gates(2, numbers, not_applicable={"share_above": "these data have no affinities"})
    assert (gates[2].passed, gates[2].reason) == (None, "does not apply: these data have no affinities")
    assert have_passed(gates)
    assert not have_passed([gates[2]])  # nothing passed


def test_gates_json_holds_every_stage_that_was_run(tmp_path):
    path = tmp_path / "gates.json"
    written = write_gates(path, {1: check_gates(1, GOOD[1]), 2: check_gates(2, BAD[2])})
    assert json.loads(path.read_text()) == written
    assert [written["passed"], *(one["passed"] for one in written["stages"].values())] == [False, True, False]
    assert {*written["stages"]["1"]["gates"][0]} == {"name", "value", "threshold", "passed", "reason"}
    assert write_gates(path, {1: check_gates(1, GOOD[1])})["passed"]
    assert not write_gates(path, {})["passed"]
    assert [one.name for one in tmp_path.iterdir()] == ["gates.json"]
