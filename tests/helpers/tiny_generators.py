"""Antibody generators in miniature, and batches for them."""

from dataclasses import asdict
from typing import Any

import torch

from hf_ext.data import AntibodyCollator, PairEncoder
from hf_ext.models import AntibodyGenerator, GeneratorConfig

NAMES = ("lstm", "lstm-attending", "transformer", "light")  # those that encode by themselves
TINY = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "d_ff": 24, "hidden_size": 12}
ANTIGENS = ["MKTAYIAKQRQISFVKSH", "ACD", "MKTAYIAKQRQISFVKSH", "GGSWLLP"]
HEAVIES = ["EVQLVESGG", "QVQ", "EVKLW", "QQ"]
LIGHTS = ["DIQMT", None, "DI", "SYELTQPP"]
AFFINITIES = [7.0, 8.5, None, 9.0]


def make_generator(architecture: str = "transformer", seed: int = 0, **settings: Any) -> AntibodyGenerator:
    """Two layers, 16 wide, no dropout, in evaluation mode, with the same weights every time."""
    torch.manual_seed(seed)
    given = {**TINY, "dropout": 0.0, "label_mean": 8.0, **settings}
    return AntibodyGenerator(GeneratorConfig(architecture=architecture, **given)).eval()


def make_rows(tokenizer: Any = None) -> list[dict[str, Any]]:
    """Four rows; the first and the third have one antigen, the second has no light chain, the third no affinity."""
    columns = PairEncoder(tokenizer).encode_rows(ANTIGENS, HEAVIES, LIGHTS, AFFINITIES)
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def make_batch(rows: Any = None) -> dict[str, Any]:
    """A batch of them."""
    return AntibodyCollator()(make_rows() if rows is None else rows)


def make_named(name: str, **settings: Any) -> AntibodyGenerator:
    """`make_generator` of one of `NAMES`."""
    architecture, _, attends = name.partition("-")
    return make_generator(architecture, attend=bool(attends), **settings)


def make_on_encoder(spec: Any, **settings: Any) -> AntibodyGenerator:
    """A new tiny decoder on a pretrained ESM; `spec` from `read_encoder`."""
    return AntibodyGenerator.from_new_weights(
        GeneratorConfig.of_size("esm", "tiny", antigen_encoder=asdict(spec), **settings)
    )
