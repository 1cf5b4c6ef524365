"""Generated demo data: antigens, and antibodies whose CDR-H3 follows the antigen's epitope by a planted rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from datasets import Dataset

NUM_ROWS = 600
NUM_SITES = 4  # of the epitope, that a part of CDR-H3 answers each
# What may stand at a site of the epitope -> what CDR-H3 answers with: charge to charge, small to large.
RULE = {"K": "DE", "E": "RK", "F": "GS", "G": "WY", "N": "HQ", "L": "TV"}
_SITE_RESIDUES = 3
_ANTIGEN = ("MKTAYIAKQRQI", "SVAD")
_HEAVY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAR",
    "DYWGQGTLVTVSS",
)
_LIGHT = "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQSYSTPTFGQGTKVEIK"


def make_demo_pairs(num_rows: int = NUM_ROWS, seed: int = 0) -> Dataset:
    """Rows of antigen, heavy and light; every antigen is another one, and its antibody follows from it.

    The rule: the antigen's epitope has four sites, each three times K, E, F, G, N or L. CDR-H3 has two residues for
    each site, in their order: K is answered by DE, E by RK, F by GS, G by WY, N by HQ and L by TV. All else is the same
    in all antigens, and in all antibodies.

    Args:
        num_rows: pairs, at most 1,296.
        seed: decides which epitopes, and their order.
    """
    epitopes = [*itertools.product(RULE, repeat=NUM_SITES)]
    chosen = np.random.default_rng(seed).permutation(len(epitopes))[:num_rows]
    sites = [epitopes[i] for i in chosen]
    return Dataset.from_dict(
        {
            "antigen": ["".join(site * _SITE_RESIDUES for site in row).join(_ANTIGEN) for row in sites],
            "heavy": [answer_epitope(row).join(_HEAVY) for row in sites],
            "light": [_LIGHT] * len(sites),
        }
    )


def answer_epitope(sites: Sequence[str]) -> str:
    """The part of CDR-H3 that the rule gives for the sites of an epitope."""
    return "".join(RULE[site] for site in sites)
