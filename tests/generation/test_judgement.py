"""The first line names what the seed's project did not see: repeats, constant regions, the alphabet, a flat judge."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from antibody_examples import KAPPA_CONSTANT, RESIDUES, antibodies, heavy, light, random_antigens, random_cdr3

from hf_ext.errors import DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.evaluation.verdict import MODEL
from hf_ext.generation.judging.baselines import RANDOM, RETRIEVAL, SHUFFLED
from hf_ext.generation.judging.conditions import judge_condition
from hf_ext.generation.judging.discriminator import ANTIGENS_UNKNOWN, Discriminator
from hf_ext.generation.judging.judgement import HELD_OUT, Judges, judge_generated
from hf_ext.generation.judging.numbering import Numberer
from hf_ext.generation.judging.rows import AntibodyRows, Sampling
from hf_ext.optional import import_problem

ANTIGENS = random_antigens(15, seed=1)
ASKED = [one for one in ANTIGENS for _ in range(4)]


def planted_cdr3(antigen: str) -> str:
    """A rule that reads the antigen: its first residues, where they are none that patterns stumble on."""
    return "AR" + "".join("A" if one in "CWG" else one for one in antigen[:10])


def rows_of(cdr3s: list[str], lights: list[str], antigens: list[str]) -> AntibodyRows:
    return AntibodyRows.of_columns([heavy(one) for one in cdr3s], lights, antigens)


def mutated(cdr3: str, generator: np.random.Generator) -> str:
    place = int(generator.integers(2, len(cdr3)))
    return cdr3[:place] + str(generator.choice(list("ADEFHKLMNPQRSTVY"))) + cdr3[place + 1 :]


@pytest.fixture(scope="module")
def training() -> AntibodyRows:
    known = random_antigens(20, seed=2)
    generator = np.random.default_rng(3)
    asked = [known[i % 20] for i in range(60)]
    return rows_of([mutated(planted_cdr3(one), generator) for one in asked], [light()] * 60, asked)


@pytest.fixture(scope="module")
def held_out() -> AntibodyRows:
    return rows_of([planted_cdr3(one) for one in ANTIGENS], [light()] * 15, ANTIGENS)


@pytest.fixture(scope="module")
def good() -> AntibodyRows:
    """Follows the rule up to one residue, each output once."""
    generator = np.random.default_rng(4)
    lights = [light("QQ" + random_cdr3(generator, 5)) for _ in ASKED]
    return rows_of([mutated(planted_cdr3(one), generator) for one in ASKED], lights, ASKED)


def reading(rows: AntibodyRows, effect: float = 0.1, condition: str = "antigen"):
    generator = np.random.default_rng(0)
    tokens = np.full(len(rows), 230)
    true = tokens * generator.uniform(0.5, 1.0, len(rows))
    shuffled = true + tokens * (effect + generator.normal(0, 0.01, len(rows)) * (effect != 0))
    return judge_condition(condition, tokens, true, shuffled, sampling(rows))


def judge(rows, training, held_out, **options):
    options = {"effects": [reading(rows)], **options}
    return judge_generated(rows, training, held_out, sampling(rows), **options)


def test_a_generator_that_follows_the_rule_beats_every_baseline(good, training, held_out):
    found = judge(good, training, held_out)
    assert found.verdict.text.startswith("Better than every baseline on CDR-H3 recovery (hardest: ")
    assert "reads the antigen" in found.verdict.text
    assert "not by numbering" in found.verdict.text  # validity was not strict, and that is said
    assert (found.verdict.outcome, found.verdict.is_better) == ("better", True)
    assert [*found.sets] == [MODEL, RANDOM, SHUFFLED, RETRIEVAL, HELD_OUT]
    assert all(one.is_better for one in found.comparisons["cdr3"].values())
    numbers = found.numbers()
    assert (numbers["valid"], numbers["unique"], numbers["share_above"]) == (1.0, 1.0, None)
    assert numbers["beats_random"] > 0.3
    tree = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert tree["verdict"]["text"] == found.text().splitlines()[0] == found.verdict.text
    assert tree["sets"][MODEL]["recovery"]["cdr3"]["value"] > 0.9
    assert tree["sets"][MODEL]["recovery"]["cdr3"]["num_units"] == 15
    assert tree["sets"][RANDOM]["validity"]["motif"]["value"] == 0.0
    assert tree["sets"][RETRIEVAL]["novelty"]["memorised"]["value"] == 1.0
    assert {"CDR-H3 recovery", RETRIEVAL, HELD_OUT} <= {*map(str.strip, found.text().replace("\n", "  ").split("  "))}


def test_what_is_wrong_with_outputs_is_named_first(good, training, held_out):
    noise = ["".join(np.random.default_rng(i).choice(list(RESIDUES), size=110)) for i in range(120)]
    lights = [(one + KAPPA_CONSTANT)[:177].ljust(177, "S") for one in good.chain("light")]
    too_long = "100 % of light chains are longer than any variable domain (median 177 residues)"
    invalid = (
        "Invalid: 0 % of outputs are antibodies by their conserved residues' pattern (100 % pass the check of the "
    )
    cases = {
        "Collapsed: 1.67 % of outputs are distinct (1 of 60)": ([heavy("ARDRSTYFDY")] * 60, [light()] * 60),
        "Collapsed: 25 %": ([heavy(planted_cdr3(one)) for one in ASKED], [light()] * 60),  # four times each
        "Memorised: 100 % of outputs are training antibodies to the residue": (training.heavy, training.light),
        f"{invalid}alphabet alone); no better than": (noise[:60], noise[60:]),
        f"{invalid}alphabet alone); {too_long}": (good.heavy, lights),
    }
    for text, chains in cases.items():
        found = judge(AntibodyRows.of_columns(*chains, ASKED), training, held_out)
        assert found.verdict.text.startswith(text)
        assert found.verdict.is_better is False
        assert (found.numbers()["valid"] == 0.0) is ("Invalid" in text)
    few = AntibodyRows.of_columns(good.heavy, [lights[0], *good.light[1:]], ASKED)
    assert judge(few, training, held_out).verdict.outcome == "better"


class Rates:
    """Reads any columns; predicts what a function of the heavy chain says."""

    def __init__(self, rate):
        self.rate = rate
        parts = {name: [name] for name in ("heavy", "light", "antigen")}
        tokenizers = dict.fromkeys(parts, SimpleNamespace(max_residues=None))
        self.collator = SimpleNamespace(columns=parts, tokenizers=tokenizers, missing_chains=[], too_long="error")

    def predict(self, rows):
        return np.array([self.rate(one) for one in rows["heavy"]], np.float32)


def discriminator(rate, outcome="better", text="Better.") -> Judges:
    roles = {name: name for name in ("heavy", "light", "antigen")}
    record = {"verdict": {"outcome": outcome, "text": text}}
    return Judges(discriminator=Discriminator(Rates(rate), roles, record))


def sampling(rows: AntibodyRows) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", rows.antigens), num_resamples=300)


def tell_noise(one: str) -> float:
    return 8.0 if one.endswith("VTVSS") else 5.0 + 0.001 * len(one)


def test_a_collapsed_discriminator_is_named_and_its_share_is_no_gate(good, training, held_out):
    flat = judge(good, training, held_out, judges=discriminator(lambda one: 7.4 + 0.0001 * len(one)))
    assert flat.verdict.text.startswith("The discriminator's scores are not to be believed: it has collapsed: 255 ")
    assert flat.sets[MODEL].scores["affinities"]["share_above"]["value"] == 1.0
    assert flat.numbers()["share_above"] is None
    assert flat.verdict.outcome == "better"  # of the generator itself nothing is wrong


def test_a_discriminator_that_tells_antibodies_from_noise_is_believed(good, training, held_out):
    asked = np.linspace(6, 9, len(good))
    found = judge(good, training, held_out, judges=discriminator(tell_noise), asked=asked)
    assert "discriminator" not in found.verdict.text
    assert ANTIGENS_UNKNOWN in found.text().splitlines()
    assert found.numbers()["share_above"] == 1.0
    assert found.sets[RANDOM].scores["affinities"]["share_above"]["value"] == 0.0
    assert found.comparisons["affinity"][RANDOM].is_better
    no_better = judge(good, training, held_out, judges=discriminator(lambda one: 7.0 + len(set(one[:9])) / 9))
    assert f"it does not rate these outputs above {RANDOM}" in no_better.verdict.text
    bad = discriminator(tell_noise, "no better", "No better than a constant: RMSE 1.2 against 1.1.")
    text = judge(good, training, held_out, judges=bad).verdict.text
    assert "its own record says: No better than a constant" in text


def test_what_is_ignored_or_not_better_or_has_too_few_antigens_comes_first(good, training, held_out):
    generator = np.random.default_rng(6)
    rows = rows_of([random_cdr3(generator) for _ in ASKED], [light()] * 60, ASKED)
    found = judge(rows, training, held_out, effects=[reading(rows, 0.0)])
    assert found.verdict.text.startswith("Ignores the antigen: shuffling it costs ")
    assert "better than every baseline" not in found.verdict.text
    assert found.verdict.is_better is False
    text = judge(good, training, held_out, effects=[reading(good), reading(good, 0.0, "pKd")]).verdict.text
    assert text.startswith("Ignores the pKd: shuffling it costs 0.0000 [0.0000, 0.0000] nats per token; better than")
    unknown = judge(good, training, held_out, effects=[]).verdict.text
    assert "whether the antigen is read was not measured" in unknown
    # Training that holds near copies of the test antigens with the binders that are asked for.
    near = [one[:-2] + "AA" for one in ANTIGENS]
    known = rows_of([planted_cdr3(one) for one in ANTIGENS] * 4, [light("QQSYSAPLT")] * 60, near * 4)
    found = judge(good, known, held_out)
    assert found.verdict.text.startswith(f"No better than {RETRIEVAL} on CDR-H3 recovery (")
    assert (found.verdict.outcome, found.verdict.is_better) == ("no better", False)
    found = judge(good, training, training)  # no held-out binders of these antigens
    assert found.verdict.text.startswith("Not compared with any baseline: no row has a CDR-H3 recovery")
    assert found.verdict.is_better is None
    few = judge(good.select(np.isin(good.antigens, ANTIGENS[:5])), training, held_out)
    assert few.verdict.is_better is None
    assert "too few to claim anything" in few.verdict.text
    assert judge(antibodies(3, ANTIGENS), training, held_out).verdict.text.startswith("Only 3 outputs")
    with pytest.raises(DataError, match="no outputs to judge"):
        judge_generated(good.select([]), training, held_out, sampling(good))


@pytest.mark.skipif(import_problem("immunum") is not None, reason="the extra 'numbering'")
def test_with_numbering_validity_is_strict(good, training, held_out):
    found = judge(good, training, held_out, judges=Judges(numberer=Numberer()))
    assert found.numbers()["valid"] == 1.0
    assert "not by numbering" not in found.verdict.text
    assert "Strictly valid variable domains" in found.text()
