"""Variable domains for tests: germline frameworks with made-up third CDRs, and what goes wrong with them."""

import numpy as np
from inside import AntibodyRows

HEAVY_V = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYC"
HEAVY_J = "WGQGTLVTVSS"
LIGHT_V = "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYC"
LIGHT_J = "FGQGTKVEIK"
LIGHT_CDR3 = "QQSYSTPLT"
KAPPA_CONSTANT = "RTVAAPSVFIFPPSDEQLKSGTASVVCLLNNFYPREAKVQWKVDNALQSGNSQESVTEQDSKDSTYSLSS"
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def heavy(cdr3: str) -> str:
    return HEAVY_V + cdr3 + HEAVY_J


def light(cdr3: str = LIGHT_CDR3) -> str:
    return LIGHT_V + cdr3 + LIGHT_J


def random_cdr3(generator: np.random.Generator, size: int = 10) -> str:
    """No cysteine, tryptophan or glycine, so that patterns have one answer."""
    letters = [one for one in RESIDUES if one not in "CWG"]
    return "AR" + "".join(generator.choice(letters, size=size))


def antibodies(num: int, antigens: list[str], seed: int = 0) -> AntibodyRows:
    """`num` pairs with heavy CDR3 of their own, for antigens in turn."""
    generator = np.random.default_rng(seed)
    chains = [heavy(random_cdr3(generator)) for _ in range(num)]
    return AntibodyRows.of_columns(chains, [light()] * num, [antigens[i % len(antigens)] for i in range(num)])


def random_antigens(num: int, seed: int = 0, size: int = 40) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list(RESIDUES), size=size)) for _ in range(num)]
