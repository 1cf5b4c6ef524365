"""Whether outputs are antibodies: form, patterns and numbering say different things, and each is called by its name."""

import numpy as np
import pytest
import torch
from antibody_examples import HEAVY_V, KAPPA_CONSTANT, LIGHT_CDR3, antibodies, heavy, light

from hf_ext.errors import MissingDependencyError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.numbering import Numberer
from hf_ext.generation.judging.rows import AntibodyRows, Sampling
from hf_ext.generation.judging.validity import (
    Humanness,
    find_cdr3,
    find_problems,
    find_structure_problems,
    judge_validity,
)
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


def judge(rows: AntibodyRows, numberer: Numberer | None = None):
    return judge_validity(rows, Sampling(ResamplingUnits.of("row", range(len(rows)))), numberer)


def test_form_is_letters_and_chains_and_no_more():
    rows = rows_of(("ACD", "EFG"), ("AXD", "EFG"), ("", "EFG"), ("ACD", None), ("AAAA", "AAAA"))
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
    assert find_problems(rows_of(*cases), needs_light=False) == [*cases.values()]


def test_without_numbering_nothing_is_called_strict_and_shuffled_residues_pass_by_alphabet_alone():
    rows = antibodies(20, ["AG"])
    found, is_valid = judge(rows)
    assert (found["strict"], found["numbered"], found["motif"]["value"]) == (None, None, 1.0)
    assert is_valid.all()
    shuffled, is_valid = judge(rows_of(*(("".join(sorted(one)), "".join(sorted(other))) for one, other in rows.pairs)))
    assert (shuffled["well_formed"]["value"], shuffled["motif"]["value"]) == (1.0, 0.0)
    assert not is_valid.any()


def test_light_chains_with_a_constant_region_are_counted_by_length():
    rows = rows_of(*[(heavy(CDR3), (light() + KAPPA_CONSTANT)[:177])] * 3, (heavy(CDR3), light()))
    found, is_valid = judge(rows)
    assert found["num_too_long"] == {"heavy": 0, "light": 3}
    assert found["median_length_of_too_long"] == {"heavy": None, "light": 177.0}
    assert is_valid.tolist() == [False, False, False, True]


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
    assert find_problems(rows_of(*((one, light()) for one in cases)), Numberer(library)) == [*cases.values()]
    single, inserted = Numberer(library).number([whole, heavy(long)])
    assert "".join(single.positions.get(place, "") for place in range(105, 118)) == CDR3
    assert "".join(single.positions.get(place, "") for place in range(1, 39)) == HEAVY_V[:33]
    assert inserted.length == 125
    assert "".join(inserted.positions[place] for place in range(105, 118)) == "ARDRSTYSTAMDY"


@pytest.mark.skipif(import_problem("immunum") is not None, reason="the extra 'numbering'")
def test_shuffled_chains_hold_no_domain_however_short():
    generator = np.random.default_rng(0)
    shuffled = ["".join(generator.permutation([*heavy(CDR3)])) for _ in range(50)]
    assert Numberer().number(shuffled) == [None] * 50


@each_library
def test_numbering_counts_as_strict_what_is_whole_and_leaves_the_threads_alone(library):
    before = torch.get_num_threads()
    double = (heavy(CDR3) * 2, light())
    rows = rows_of(*[(heavy(CDR3), light())] * 3, (light(), heavy(CDR3)), (heavy(CDR3), "AXA" * 40), double)
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
    found = Humanness().score(rows_of((whole, light()), (shuffled, None), ("ACD", None)))
    assert found[0] > 0.8
    assert found[1:].tolist() == [0.0, 0.0]
