"""Whether outputs are antibodies: form, patterns and numbering say different things, and each is called by its name."""

import numpy as np
import pytest
import torch
from antibody_examples import HEAVY_J, HEAVY_V, KAPPA_CONSTANT, LIGHT_CDR3, antibodies, heavy, light

from hf_ext.errors import MissingDependencyError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.numbering import NumberedDomain, Numberer, find_domain_problem
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.judging.scores import Sampling
from hf_ext.generation.judging.validity import find_cdr3, find_motif_problems, find_structure_problems, judge_validity
from hf_ext.optional import import_problem

CDR3 = "ARDRSTYFDY"
each_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(one, marks=pytest.mark.skipif(import_problem(one) is not None, reason=f"{one} is not installed"))
        for one in ("immunum", "anarcii")
    ],
)


def rows_of(*pairs: tuple[str, str | None]) -> AntibodyRows:
    return AntibodyRows.of_columns([one for one, _ in pairs], [one for _, one in pairs], ["AG"] * len(pairs))


def sampling(rows: AntibodyRows) -> Sampling:
    return Sampling(ResamplingUnits.of("row", range(len(rows))))


def test_form_is_letters_and_chains_and_no_more():
    rows = rows_of(("ACD", "EFG"), ("AXD", "EFG"), ("", "EFG"), ("ACD", None), ("AAAA", "AAAA"))
    assert find_structure_problems(rows) == [None, "heavy chain with X", "no heavy chain", "no light chain", None]
    assert find_structure_problems(rows, needs_light=False)[3] is None


def test_malformed_tokens_are_the_first_problem():
    rows = AntibodyRows(("ACD",), ("EFG",), ("AG",), ("two <sep>",))
    assert find_structure_problems(rows) == ["two <sep>"]


def test_cdr3_stands_between_the_second_cysteine_and_the_j_motif():
    assert find_cdr3(heavy(CDR3)) == CDR3
    assert find_cdr3(heavy("AKCSGGSCYDY")) == "AKCSGGSCYDY"  # cysteines inside of it
    assert find_cdr3(light(), "light") == LIGHT_CDR3
    assert find_cdr3(light()) is None  # FGxG is no heavy chain's motif
    assert find_cdr3("A" * 120) is None


def test_patterns_pass_a_pair_of_domains_and_nothing_else():
    whole = (heavy(CDR3), light())
    rows = rows_of(
        whole,
        (heavy(CDR3), None),
        (light(), heavy(CDR3)),
        (heavy(CDR3).replace("YYC", "YYS"), light()),
        (heavy(CDR3), light() + KAPPA_CONSTANT),
        (heavy(CDR3)[:60], light()),
        (heavy(CDR3) * 2, light()),
        (heavy(CDR3)[::-1], light()),
    )
    no_heavy = "heavy chain without the pattern Cys-Trp-Cys and WGxG"
    assert find_motif_problems(rows) == [
        None,
        None,
        no_heavy,
        no_heavy,
        "light chain with more than 10 residues after its variable domain",
        no_heavy,
        "heavy chain with more than 10 residues after its variable domain",
        no_heavy,
    ]


def test_without_numbering_nothing_is_called_strict():
    rows = antibodies(20, ["AG"])
    found = judge_validity(rows, sampling(rows))
    assert (found.strict, found.numbered) == (None, None)
    assert found.decisive is found.motif
    assert "patterns" in found.as_dict()["note"]


def test_shuffled_residues_pass_by_alphabet_alone():
    rows = antibodies(20, ["AG"])
    shuffled = rows_of(*(("".join(sorted(one)), "".join(sorted(other))) for one, other in rows.pairs))
    found = judge_validity(shuffled, sampling(shuffled))
    assert (found.well_formed["value"], found.motif["value"]) == (1.0, 0.0)
    assert judge_validity(rows, sampling(rows)).motif["value"] == 1.0


def test_light_chains_with_a_constant_region_are_counted_by_length():
    rows = rows_of(*[(heavy(CDR3), (light() + KAPPA_CONSTANT)[:177])] * 3, (heavy(CDR3), light()))
    found = judge_validity(rows, sampling(rows))
    assert found.num_too_long == {"heavy": 0, "light": 3}
    assert found.median_length_of_too_long == {"heavy": None, "light": 177.0}
    assert found.is_valid.tolist() == [False, False, False, True]


def domain(**changes) -> NumberedDomain:
    regions = {"FR1": "A" * 25, "CDR1": "A" * 8, "FR2": "A" * 17, "CDR2": "A" * 8, "FR3": "A" * 38, "CDR3": "A" * 10}
    positions = {23: "C", 41: "W", 104: "C", 118: "W", 119: "G", 120: "Q", 121: "G"}
    settings = {"chain_type": "H", "positions": positions, "regions": {**regions, "FR4": "A" * 11}, "num_outside": 0}
    return NumberedDomain(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"chain_type": "K"}, "heavy chain is of type K"),
        ({"positions": {**domain().positions, 104: "S"}}, "heavy chain has S at position 104, where C is conserved"),
        ({"positions": {**domain().positions, 118: "F"}}, "heavy chain has FGQG for the J motif WGxG"),
        ({"positions": {**domain().positions, 120: "P"}}, None),
        ({"regions": {"FR1": "A" * 99}}, "heavy domain of 99 residues, not 100 to 145"),
        ({"regions": {"FR1": "A" * 146}}, "heavy domain of 146 residues, not 100 to 145"),
        ({"num_outside": 10}, None),
        ({"num_outside": 11}, "heavy chain with 11 residues outside its variable domain"),
    ],
)
def test_a_numbered_chain_is_strictly_valid_only_as_one_whole_domain(changes, problem):
    assert find_domain_problem(domain(**changes), "heavy") == problem


def test_a_chain_that_is_not_numbered_is_invalid():
    assert find_domain_problem(None, "light") == "light chain is not numbered as a variable domain"


@pytest.mark.parametrize(("library", "extra"), [("immunum", "numbering"), ("anarcii", "anarcii")])
def test_numbering_without_its_library_names_the_extra(library, extra, monkeypatch):
    monkeypatch.setattr("hf_ext.optional.import_problem", lambda package: "is not installed")
    monkeypatch.setattr("hf_ext.generation.judging.numbering.import_problem", lambda package: "is not installed")
    with pytest.raises(MissingDependencyError, match=rf"{library} is needed .*hf_ext\[{extra}\]"):
        Numberer.of(library)
    assert Numberer.of("auto") is Numberer.of("off") is None


@each_library
def test_a_library_accepts_half_a_domain_and_two_and_our_checks_do_not(library):
    numberer = Numberer(library)
    whole, long = heavy(CDR3), "ARDRSTYFDYAYSTAMDY"  # 18 residues for the 13 positions of CDR3
    asked = [whole[:60], whole * 2, whole, "A" * 120, heavy(long)]
    half, double, single, nonsense, inserted = numberer.number(asked)
    assert half is not None  # if a later version refuses it, so much the better: the check below stays right
    assert find_domain_problem(half, "heavy") == "heavy chain has nothing at position 104, where C is conserved"
    assert find_domain_problem(double, "heavy") == "heavy chain with 117 residues outside its variable domain"
    assert find_domain_problem(single, "heavy") is None
    assert nonsense is None
    assert single.regions["CDR3"] == CDR3
    assert single.regions["FR3"].endswith("YYC")
    assert single.regions["FR4"] == HEAVY_J
    assert single.regions["FR1"] + single.regions["CDR1"] == HEAVY_V[:33]
    assert (inserted.regions["CDR3"], inserted.length, inserted.num_outside) == (long, 125, 0)
    assert "".join(inserted.positions[place] for place in range(105, 118)) == "ARDRSTYSTAMDY"


def test_shuffled_chains_hold_no_domain_however_short():
    generator = np.random.default_rng(0)
    shuffled = ["".join(generator.permutation([*heavy(CDR3)])) for _ in range(50)]
    assert Numberer().number(shuffled) == [None] * 50


@each_library
def test_numbering_counts_as_strict_what_is_whole_and_leaves_the_threads_alone(library):
    before = torch.get_num_threads()
    rows = rows_of(*[(heavy(CDR3), light())] * 3, (light(), heavy(CDR3)), (heavy(CDR3), "AXA" * 40))
    found = judge_validity(rows, sampling(rows), Numberer(library))
    assert torch.get_num_threads() == before
    assert found.is_valid.tolist() == [True, True, True, False, False]
    assert (found.numbered["value"], found.strict["value"], found.as_dict()["numbered_by"]) == (0.6, 0.6, library)
    assert found.decisive is found.strict
    assert found.problems == [("heavy chain is of type K", 1), ("light chain with X", 1)]
