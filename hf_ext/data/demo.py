"""Generated demo data with planted rules, and two small untrained encoders.

Of affinity: antibody-antigen pairs whose pKd follows from their loops. Of generation: antigens, and antibodies whose
CDR-H3 follows from the antigen's epitope.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertModel, BertTokenizer, EsmConfig, EsmModel

from .batches.tokenization import make_esm_tokenizer
from .proteins import ESM2, STANDARD

NUM_ROWS = 3000
NOISE = 0.25  # standard deviation of the simulated measurement, pKd units
NUM_PAIRS = 600
NUM_SITES = 4  # of the epitope, that a part of CDR-H3 answers each
# What may stand at a site of the epitope -> what CDR-H3 answers with: charge to charge, small to large.
RULE = {"K": "DE", "E": "RK", "F": "GS", "G": "WY", "N": "HQ", "L": "TV"}
_SITE_RESIDUES = 3
_VH = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKG"
_VK = "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPS"
_BERT_VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD, "X"]


def make_demo_table(num_rows: int = NUM_ROWS) -> Dataset:
    """Makes rows of heavy, light, antigen and pKd with a planted sequence-label rule.

    The rule: pKd rises with aromatic residues (F, W, Y) in the heavy chain's loop, with opposite charges of loop and
    epitope and with aliphatic residues (I, L, V, M) in the epitope, falls with prolines in the light chain's loop; plus
    Gaussian noise of 0.25.

    Args:
        num_rows: measurements; they pair 300 heavy chains, 40 light chains and 400 antigens at random.
    """
    rng = np.random.default_rng(0)
    heavy = _loops(rng, 300, 14)
    light = _loops(rng, 40, 8)
    epitope = _loops(rng, 400, 14)
    h = rng.integers(len(heavy), size=num_rows)
    w = rng.integers(len(light), size=num_rows)
    a = rng.integers(len(epitope), size=num_rows)
    charges = _charge(heavy)[h] * _charge(epitope)[a]
    signal = 0.6 * _count(heavy, "FWY")[h] - 0.25 * charges
    signal = signal - 0.5 * _count(light, "P")[w] + 0.2 * _count(epitope, "ILVM")[a]
    signal = (signal - signal.mean()) / signal.std()
    labels = 7.5 + 1.2 * signal + NOISE * rng.standard_normal(num_rows)
    return Dataset.from_dict(
        {
            "heavy": [f"{_VH}{heavy[i]}WGQGTLVTVSS" for i in h],
            "light": [f"{_VK}{light[i]}FGQGTKVEIK" for i in w],
            "antigen": [f"MKTAYIAKQRQISFVKSHFSRQLEERLGLIE{epitope[i]}VQAPILSRVGDGTQDNLSGAEK" for i in a],
            "pKd": np.round(labels, 4).tolist(),
        }
    )


def _loops(rng: np.random.Generator, count: int, size: int) -> list[str]:
    """Draws distinct loops; their composition varies, so that a pooled embedding can tell them apart."""
    loops: set[str] = set()
    while len(loops) < count:
        weights = rng.dirichlet(np.full(len(STANDARD), 0.4))
        loops.add("".join(rng.choice(list(STANDARD), size=size, p=weights)))
    return sorted(loops)


def _charge(loops: list[str]) -> np.ndarray:
    return _count(loops, "KR") - _count(loops, "DE")


def _count(loops: list[str], letters: str) -> np.ndarray:
    return np.array([sum(map(loop.count, letters)) for loop in loops], float)


def make_demo_pairs(num_rows: int = NUM_PAIRS) -> Dataset:
    """Makes rows of antigen, heavy and light; every antigen is another one, and its antibody follows from it.

    The rule: the antigen's epitope has four sites, each three times K, E, F, G, N or L. CDR-H3 has two residues for
    each site, in their order: K is answered by DE, E by RK, F by GS, G by WY, N by HQ and L by TV. All else is the same
    in all antigens, and in all antibodies.

    Args:
        num_rows: pairs, at most 1,296.
    """
    epitopes = [*itertools.product(RULE, repeat=NUM_SITES)]
    chosen = np.random.default_rng(0).permutation(len(epitopes))[:num_rows]
    sites = [epitopes[i] for i in chosen]
    frame = f"{_VH}RFTISRDNSKNTLYLQMNSLRAEDTAVYYCAR"
    return Dataset.from_dict(
        {
            "antigen": [f"MKTAYIAKQRQI{''.join(site * _SITE_RESIDUES for site in row)}SVAD" for row in sites],
            "heavy": [f"{frame}{''.join(RULE[site] for site in row)}DYWGQGTLVTVSS" for row in sites],
            "light": [f"{_VK}RFSGSGSGTDFTLTISSLQPEDFATYYCQQSYSTPTFGQGTKVEIK"] * len(sites),
        }
    )


def make_demo_encoders(folder: str | Path) -> tuple[str, str]:
    """Writes two small encoders with random weights as ordinary transformers folders.

    Returns:
        Paths of a BERT-style encoder (for antibodies) and an ESM-2-style one (for antigens); 64 wide, 2 layers.
    """
    bert = Path(folder) / "bert"
    esm = Path(folder) / "esm"
    bert.mkdir(parents=True, exist_ok=True)
    (bert / "vocab.txt").write_text("\n".join(_BERT_VOCAB) + "\n")
    BertTokenizer(str(bert / "vocab.txt"), do_lower_case=False).save_pretrained(bert)
    make_esm_tokenizer(model_max_length=1024).save_pretrained(esm)
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape["intermediate_size"] = 128
    of_bert = BertConfig(vocab_size=len(_BERT_VOCAB), **shape)
    of_esm = EsmConfig(**ESM2, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(of_bert, add_pooling_layer=False).save_pretrained(bert)
        EsmModel(of_esm, add_pooling_layer=False).save_pretrained(esm)
    return str(bert), str(esm)
