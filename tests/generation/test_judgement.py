"""What is said of outputs: valid, new, distinct, better than baselines, read from their antigen, by whom; and gates."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from antibody_examples import KAPPA_CONSTANT, RESIDUES, antibodies, heavy, light, random_antigens, random_cdr3
from inside import AntibodyRows, Sampling, check_gates, have_passed, judge_condition, judge_generated
from labelled_rows import make_labelled

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import MODEL, ResamplingGroups
from hf_ext.generation.judging.copies import RANDOM, RETRIEVAL, SHUFFLED, find_recovery, judge_copies, make_baselines
from hf_ext.generation.judging.discriminator import Discriminator, find_roles, judge_affinities
from hf_ext.generation.judging.judgement import HELD_OUT, find_gate_numbers, shuffle_affinities, shuffle_antigens
from hf_ext.generation.rows import compare_means, find_cdr3, find_problems, mean_score
from hf_ext.generation.stages import GATES, GatesFailed, check_passed, write_gates

pytestmark = pytest.mark.internals
ANTIGENS = random_antigens(15, seed=1)
ASKED = [one for one in ANTIGENS for _ in range(4)]
CDR3 = "ARDRSTYFDY"


def by_antigen(values) -> Sampling:
    return Sampling(ResamplingGroups.of("antigen", values), num_resamples=300)


def test_rows_without_a_value_are_left_out_and_few_units_are_not_trusted():
    score = mean_score([1.0, np.nan, 3.0], by_antigen(["a", "b", "c"]))
    assert (score["value"], score["n"], score["num_units"]) == (2.0, 2, 2)
    assert mean_score([np.nan], by_antigen(["a"]))["undefined"] == "no row has a value"
    compared = compare_means([1.0, np.nan, 3.0], [2.0, 5.0, np.nan], by_antigen(["a", "b", "c"]))
    assert (compared.n, compared.improvement) == (1, 1.0)
    few = compare_means(np.zeros(5), np.ones(5), by_antigen(range(5)))
    assert (few.improvement, few.low, few.is_better) == (1.0, 1.0, False)
    assert compare_means(np.zeros(10), np.ones(10), by_antigen(range(10))).is_better
    found = compare_means([20.0, 60.0], [10.0, 60.0], by_antigen(["a", "b"]), num_tokens=[10, 30])
    assert (found.before, found.after, found.improvement) == (2.0, 1.75, 0.25)


def test_shuffled_antigens_are_a_derangement_and_of_another_cluster_where_that_can_be():
    antigens, clusters = list("abcdef") * 3, [0, 0, 0, 1, 2, 2] * 3
    group = dict(zip(antigens, clusters))
    for seed in range(20):
        shuffled = shuffle_antigens(antigens, seed)
        other = dict(zip(antigens, shuffled))
        assert all(old != new for old, new in other.items())
        assert sorted(other.values()) == sorted(other)
        assert [other[one] for one in antigens] == shuffled  # one for all rows of an antigen
        assert all(group[old] != group[new] for old, new in zip(antigens, shuffle_antigens(antigens, seed, clusters)))
    assert len({tuple(shuffle_antigens(antigens, seed)) for seed in range(20)}) > 5
    assert all(old != new for old, new in zip("abcde", shuffle_antigens("abcde", 0, [0, 0, 0, 0, 1])))
    with pytest.raises(DataError, match=r"2 rows of 1 antigen"):
        shuffle_antigens(["a", "a"])


def test_shuffled_affinities_are_those_of_the_other_half():
    assert shuffle_affinities([5.0, 6.0, 8.0, 9.0]) == [8.0, 9.0, 5.0, 6.0]
    with pytest.raises(DataError, match="fewer than two distinct"):
        shuffle_affinities([7.0, 7.0])


def reading(rows: AntibodyRows, effect: float = 0.1, condition: str = "antigen"):
    """Losses of rows whose own noise is far larger than that of a pair."""
    generator = np.random.default_rng(0)
    tokens = np.full(len(rows), 230)
    true = tokens * generator.uniform(0.5, 1.0, len(rows))
    shuffled = true + tokens * (effect + generator.normal(0, 0.01, len(rows)) * (effect != 0))
    return judge_condition(condition, tokens, true, shuffled, by_antigen(rows.antigens))


def test_a_condition_is_read_ignored_or_undecided():
    rows = antibodies(60, ANTIGENS)
    found = reading(rows)
    assert (found["reading"], found["comparison"]["num_units"]) == ("reads", 15)
    assert found["comparison"]["improvement"] == pytest.approx(0.1, abs=0.01)
    assert reading(rows, 0.0)["text"].startswith("ignores the antigen: shuffling it costs 0.0000 [")
    assert reading(rows, -0.1)["reading"] == "ignores"
    few = reading(rows.select(range(5)))
    assert few["text"].startswith("not known whether it reads the antigen: too few units were held out (5; ")


def rows_of(cdr3s: list[str | None], antigens: list[str], lights: list[str] | None = None) -> AntibodyRows:
    chains = ["AAAA" if one is None else heavy(one) for one in cdr3s]
    return AntibodyRows.of_columns(chains, lights or [light()] * len(chains), antigens)


def test_distinct_outputs_copies_and_new_outputs_are_counted():
    training = antibodies(30, random_antigens(5))
    copy, near, new = training.heavy[3], training.heavy[4].replace("VESGG", "VESAG"), heavy("ARWWWWWWWWWWWWWWWWWW")
    rows = AntibodyRows.of_columns([copy, copy, near, new], [light(), light("QQ"), light(), light()], list("abcd"))
    found, by_row = judge_copies(rows, training, by_antigen(rows.antigens))
    assert (found["unique_pairs"]["value"], found["unique_cdr3"]["value"]) == (1.0, 0.75)
    assert found["memorised"]["value"] == 0.25  # a copied heavy chain with another light one is none
    assert by_row["is_copy"].tolist() == [True, False, False, False]
    assert by_row["nearest_heavy"][:3] == pytest.approx(np.array([1, 1, 1 - 1 / len(near)]))
    assert by_row["nearest_heavy"][3] < 0.9


def test_recovery_is_identity_to_the_most_alike_binder_of_the_antigen():
    held_out = rows_of(["ARDY", "ARDYEL", "AKEL", None], ["a", "a", "b", "c"])
    found = find_recovery(rows_of(["ARDYEM", "AKEL", None, "ARDY", "ARDY"], ["a", "a", "a", "c", "unknown"]), held_out)
    assert found[:3].tolist() == pytest.approx([5 / 6, 1 / 2, 0])  # ARDYEL is 3 edits of 6 from AKEL
    assert np.isnan(found[3:]).all()  # no binder with a CDR3; no binder at all


def test_baselines_are_retrieved_from_the_most_similar_antigen_or_drawn_without_replacement():
    known = random_antigens(6, size=80)
    training = antibodies(30, known)
    asked = [known[2][:60] + known[5][:15], known[4][5:], known[2]]
    rows = make_baselines(asked * 10, training)
    for pair, antigen in zip(rows[RETRIEVAL].pairs, rows[RETRIEVAL].antigens):
        expected = known[2] if antigen in (asked[0], asked[2]) else known[4]
        assert expected in [training.antigens[i] for i, one in enumerate(training.pairs) if one == pair]
    assert sorted(rows[SHUFFLED].pairs) == sorted(training.pairs)
    assert rows[SHUFFLED].pairs != training.pairs
    assert make_baselines(asked * 10, training) == rows
    assert make_baselines(asked * 10, training, seed=1)[SHUFFLED] != rows[SHUFFLED]
    with pytest.raises(DataError, match="no training antibodies"):
        make_baselines(["x"], training.select([]))


def test_patterns_pass_a_pair_of_domains_and_nothing_else():
    whole = heavy(CDR3)
    no_heavy = "heavy chain without the pattern Cys-Trp-Cys and WGxG"
    cases = {
        (whole, light()): None,
        (whole, None): None,
        ("AXD", light()): "heavy chain with X",
        ("", light()): "no heavy chain",
        (light(), whole): no_heavy,
        (whole.replace("YYC", "YYS"), light()): no_heavy,
        (whole, light() + KAPPA_CONSTANT): "light chain with more than 10 residues after its variable domain",
        (whole[:60], light()): no_heavy,
        (whole * 2, light()): "heavy chain with more than 10 residues after its variable domain",
    }
    rows = AntibodyRows.of_columns([one for one, _ in cases], [other for _, other in cases], ["AG"] * len(cases))
    assert find_problems(rows, needs_light=False) == [*cases.values()]
    assert find_problems(rows)[1] == "no light chain"
    assert find_problems(AntibodyRows(("ACD",), ("EFG",), ("AG",), ("two <sep>",))) == ["two <sep>"]
    assert find_cdr3(heavy("AKCSGGSCYDY")) == "AKCSGGSCYDY"  # cysteines inside of it
    assert find_cdr3(light()) is None  # FGxG is no heavy chain's motif


def test_columns_are_told_by_their_names():
    found = find_roles(["antibody_heavy", "Antibody-Light", "antigen sequence"])
    assert [*found.values()] == ["heavy", "light", "antigen"]
    for columns in (["sequence", "antigen"], ["heavy", "vh"], ["heavy_light"]):
        with pytest.raises(ArgumentError, match=f"reads {', '.join(columns)}: which of them is the heavy chain"):
            find_roles(columns)


def test_shares_count_what_cannot_be_predicted_as_below_and_correlation_is_with_what_was_asked_for():
    found = judge_affinities(np.array([8.0, 7.0, 6.9, np.nan]), by_antigen(range(4)))
    assert (found["share_above"]["value"], [*found]) == (0.5, ["share_above"])
    asked, groups = np.arange(40) / 10, by_antigen(range(40))
    score = judge_affinities(asked**3, groups, asked=asked)["correlation"]
    assert (score["value"], score["low"], score["interval_by"]) == (pytest.approx(1.0), pytest.approx(1.0), "antigen")
    assert judge_affinities(np.full(40, 7.0), groups, asked=asked)["correlation"]["value"] is None


def test_a_folder_predicts_what_it_can_read_and_its_record_is_a_doubt_or_none(make_affinity, tmp_path):
    model, collator = make_affinity()
    model.save_pretrained(tmp_path)
    collator.save_pretrained(tmp_path)
    for record, doubt in (
        (None, "what it is worth is not known: no verdict"),
        (
            '{"verdict": {"outcome": "no better", "text": "No better than a constant.\\nMore."}}',
            "its own record says: No",
        ),
        ('{"verdict": {"outcome": "better", "text": "Better."}}', None),
    ):
        if record:
            (tmp_path / "all_results.json").write_text(record)
        judge = Discriminator.from_pretrained(tmp_path, device="cpu")
        assert judge.doubt is None if doubt is None else judge.doubt.startswith(doubt)
    good = antibodies(3, ["MKTAYIAK"])
    chains = [*good.heavy, "A*A", "", heavy("ARDY")], [*good.light, light(), light(), None]
    found = judge.predict(AntibodyRows.of_columns(*chains, ["MKTAYIAK"] * 6))
    assert np.isfinite(found).tolist() == [True, True, True, False, False, False]
    expected = judge.predictor.predict({"heavy": good.heavy, "light": good.light, "antigen": ["MKTAYIAK"] * 3})
    assert found[:3] == pytest.approx(expected)


def test_a_model_of_classes_judges_no_antibodies(demo_encoders, tmp_path):
    for part in make_labelled("classes", demo_encoders[1], "frozen"):
        part.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="predicts classification: antibodies are judged by one number per row"):
        Discriminator.from_pretrained(tmp_path, device="cpu")


def planted_cdr3(antigen: str) -> str:
    """A rule that reads the antigen: its first residues, where they are none that patterns stumble on."""
    return "AR" + "".join("A" if one in "CWG" else one for one in antigen[:10])


def mutated(cdr3: str, generator: np.random.Generator) -> str:
    place = int(generator.integers(2, len(cdr3)))
    return cdr3[:place] + str(generator.choice(list("ADEFHKLMNPQRSTVY"))) + cdr3[place + 1 :]


@pytest.fixture(scope="module")
def training() -> AntibodyRows:
    generator, asked = np.random.default_rng(3), random_antigens(20, seed=2) * 3
    return rows_of([mutated(planted_cdr3(one), generator) for one in asked], asked)


@pytest.fixture(scope="module")
def held_out() -> AntibodyRows:
    return rows_of([planted_cdr3(one) for one in ANTIGENS], ANTIGENS)


@pytest.fixture(scope="module")
def good() -> AntibodyRows:
    """Follows the rule up to one residue, each output once."""
    generator = np.random.default_rng(4)
    lights = [light("QQ" + random_cdr3(generator, 5)) for _ in ASKED]
    return rows_of([mutated(planted_cdr3(one), generator) for one in ASKED], ASKED, lights)


def judge(rows, training, held_out, **options):
    options = {"effects": [reading(rows)], **options}
    return judge_generated(rows, training, held_out, by_antigen(rows.antigens), **options)[0]


def test_a_generator_that_follows_the_rule_beats_every_baseline(good, training, held_out):
    found = judge(good, training, held_out)
    verdict, sets = found["verdict"], found["sets"]
    assert verdict["text"].startswith("Better than every baseline on CDR-H3 recovery (hardest: ")
    assert "reads the antigen" in verdict["text"]
    assert (verdict["outcome"], verdict["is_better"], verdict["limits"]) == ("better", True, [])
    assert [*sets] == [MODEL, RANDOM, SHUFFLED, RETRIEVAL, HELD_OUT]
    assert all(one["is_better"] for one in found["comparisons"].values())
    numbers = find_gate_numbers(found)
    assert (numbers["valid"], numbers["unique"], numbers["share_above"]) == (1.0, 1.0, None)
    assert numbers["beats_random"] > 0.3
    assert json.loads(json.dumps(found, allow_nan=False))["verdict"] == verdict
    assert sets[MODEL]["cdr3_recovery"]["value"] > 0.9
    assert sets[MODEL]["cdr3_recovery"]["num_units"] == 15
    assert (sets[RANDOM]["valid"]["value"], sets[RETRIEVAL]["memorised"]["value"]) == (0.0, 1.0)


def test_what_is_wrong_with_outputs_is_named_first(good, training, held_out):
    noise = ["".join(np.random.default_rng(i).choice(list(RESIDUES), size=110)) for i in range(120)]
    lights = [(one + KAPPA_CONSTANT)[:177].ljust(177, "S") for one in good.chain("light")]
    invalid = "Invalid: 0 % of outputs are antibodies by their conserved residues' pattern"
    cases = {
        "Collapsed: 1.67 % of 60 outputs are distinct": ([heavy("ARDRSTYFDY")] * 60, [light()] * 60),
        "Collapsed: 25 %": ([heavy(planted_cdr3(one)) for one in ASKED], [light()] * 60),  # four times each
        "Memorised: 100 % of outputs are training antibodies to the residue": (training.heavy, training.light),
        f"{invalid}; no better than": (noise[:60], noise[60:]),
        f"{invalid}; better than": (good.heavy, lights),
    }
    for text, chains in cases.items():
        found = judge(AntibodyRows.of_columns(*chains, ASKED), training, held_out)
        assert found["verdict"]["text"].startswith(text)
        assert found["verdict"]["is_better"] is False
        assert (find_gate_numbers(found)["valid"] == 0.0) is ("Invalid" in text)
    assert found["sets"][MODEL]["problems"] == [
        ("light chain with more than 10 residues after its variable domain", 60)
    ]


def test_a_discriminator_in_doubt_is_named_and_its_share_is_no_gate(good, training, held_out):
    def tell_noise(rows):
        return np.array([8.0 if one.endswith("VTVSS") else 5.0 for one in rows.heavy])

    asked = np.linspace(6, 9, len(good))
    believed = judge(
        good, training, held_out, discriminator=SimpleNamespace(doubt=None, predict=tell_noise), asked=asked
    )
    assert "discriminator" not in believed["verdict"]["text"]
    assert find_gate_numbers(believed)["share_above"] == 1.0
    assert believed["sets"][RANDOM]["share_above"]["value"] == 0.0
    bad = SimpleNamespace(doubt="its own record says: no", predict=tell_noise)
    found = judge(good, training, held_out, discriminator=bad)
    assert found["verdict"]["text"].startswith("The discriminator's scores are not to be believed: its own record")
    assert found["sets"][MODEL]["share_above"]["value"] == 1.0
    assert find_gate_numbers(found)["share_above"] is None
    assert found["verdict"]["outcome"] == "better"  # of the generator itself nothing is wrong


def test_what_is_ignored_or_not_better_or_has_too_few_antigens_comes_first(good, training, held_out):
    generator = np.random.default_rng(6)
    rows = rows_of([random_cdr3(generator) for _ in ASKED], ASKED)
    verdict = judge(rows, training, held_out, effects=[reading(rows, 0.0)])["verdict"]
    assert verdict["text"].startswith("Ignores the antigen: shuffling it costs ")
    assert "better than every baseline" not in verdict["text"]
    assert verdict["is_better"] is False
    text = judge(good, training, held_out, effects=[reading(good), reading(good, 0.0, "pKd")])["verdict"]["text"]
    assert text.startswith("Ignores the pKd: shuffling it costs 0.0000 [0.0000, 0.0000] nats per token; better than")
    unknown = judge(good, training, held_out, effects=[])["verdict"]["text"]
    assert "whether the antigen is read was not measured" in unknown
    # Training that holds near copies of the test antigens with the binders that are asked for.
    near = [one[:-2] + "AA" for one in ANTIGENS]
    known = rows_of([planted_cdr3(one) for one in ANTIGENS] * 4, near * 4, [light("QQSYSAPLT")] * 60)
    verdict = judge(good, known, held_out)["verdict"]
    assert verdict["text"].startswith(f"No better than {RETRIEVAL} on CDR-H3 recovery (")
    assert (verdict["outcome"], verdict["is_better"]) == ("no better", False)
    verdict = judge(good, training, training)["verdict"]  # no held-out binders of these antigens
    assert verdict["text"].startswith("Not compared with any baseline: no row has a CDR-H3 recovery")
    assert verdict["is_better"] is None
    few = judge(good.select(np.isin(good.antigens, ANTIGENS[:5])), training, held_out)["verdict"]
    assert few["is_better"] is None
    assert "too few to claim anything" in few["text"]
    with pytest.raises(DataError, match="no outputs to judge"):
        judge_generated(good.select([]), training, held_out, by_antigen(good.antigens))


GOOD = {
    1: {"token_loss": 0.1, "reproduced": 0.9, "valid": 0.5},
    2: {"num_validation_falls": 1, "valid": 0.5, "share_above": 0.3, "unique": 0.5},
    3: {"correlation": 0.41, "valid": 0.7, "share_above": 0.5, "beats_random": 0.01},
}
BAD = {
    1: {"token_loss": 0.11, "reproduced": 0.89, "valid": 0.49},
    2: {"num_validation_falls": 0, "valid": 0.49, "share_above": 0.29, "unique": float("nan")},
    3: {"correlation": 0.4, "valid": 0.69, "share_above": None, "beats_random": 0.0},
}


def test_the_specifications_thresholds_decide():
    for stage, good in GOOD.items():
        assert [*good] == [*GATES[stage]]
        assert have_passed(check_gates(stage, good))
        for name, value in BAD[stage].items():
            gates = check_gates(stage, {**good, name: value})
            assert [gate["name"] for gate in gates if not gate["passed"]] == [name]
            assert not have_passed(gates)
    assert have_passed(check_gates(1, {**GOOD[1], "token_loss": 0.3}, {"token_loss": 0.3}))


def test_a_gate_says_its_value_and_what_is_needed_and_what_was_not_measured_fails(tmp_path):
    gate = check_gates(2, {**GOOD[2], "valid": 0.06})[1]
    assert (gate["value"], gate["threshold"], gate["passed"]) == (0.06, 0.5, False)
    assert gate["reason"].startswith("0.060; at least 0.500 is needed (share of outputs that are valid")
    numbers = {name: value for name, value in GOOD[2].items() if name != "share_above"}
    missing = check_gates(2, numbers)[2]
    assert (missing["value"], missing["passed"]) == (None, False)
    assert missing["reason"].startswith("not measured; ")
    gates = check_gates(2, numbers, has_affinities=False)
    assert gates[2]["passed"] is None
    assert gates[2]["reason"].startswith("does not apply: the data have no affinities")
    assert have_passed(gates)
    assert not have_passed([gates[2]])  # nothing passed
    path = tmp_path / "gates.json"
    write_gates(path, {1: check_gates(1, GOOD[1]), 2: check_gates(2, BAD[2])})
    written = json.loads(path.read_text())
    assert [written["passed"], *(one["passed"] for one in written["stages"].values())] == [False, True, False]
    assert {*written["stages"]["1"]["gates"][0]} == {"name", "value", "threshold", "passed", "reason"}
    failed = {"stage": 2, "gates": check_gates(2, BAD[2]), "gates_passed": False, "settings": {"output_dir": "out"}}
    with pytest.raises(GatesFailed, match=r"Stage 2 did not pass its gates \(num_validation_falls: 0.000; ") as ended:
        check_passed(failed)
    assert ended.value.exit_code == 1
    assert "--architecture transformer" in str(ended.value)
    check_passed({**failed, "gates_passed": True})
