"""Every speed-up is in the registry once and says what it is; the order of application holds."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import hf_ext.speedups
from hf_ext.speedups import REGISTRY

FOLDER = Path(hf_ext.speedups.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))
SHARED = ("__init__", "base", "facts", "parity", "sample")  # what speed-ups share
NAMES = [speedup.NAME for speedup in REGISTRY]


def test_every_module_and_class_is_registered_exactly_once():
    assert len(set(NAMES)) == len(NAMES) == 25
    alone = [speedup.NAME for speedup in REGISTRY if inspect.ismodule(speedup)]
    assert all(speedup.__name__.rsplit(".", 1)[1] == speedup.NAME for speedup in REGISTRY if inspect.ismodule(speedup))
    holders = {speedup.__module__.rsplit(".", 1)[1] for speedup in REGISTRY if inspect.isclass(speedup)}
    assert sorted({*alone, *holders, *SHARED}) == MODULES
    for holder in holders:
        module = import_module(f"hf_ext.speedups.{holder}")
        assert all(
            found in REGISTRY
            for found in vars(module).values()
            if getattr(found, "NAME", "") and inspect.isclass(found)
        )


@pytest.mark.parametrize("speedup", REGISTRY, ids=NAMES)
def test_a_speedup_states_its_class_and_has_the_two_functions(speedup):
    assert speedup.KIND in ("I", "N", "L")
    assert f"Class {speedup.KIND}" in speedup.__doc__
    assert list(inspect.signature(speedup.decide).parameters) == ["context"]
    assert list(inspect.signature(speedup.apply).parameters) == ["decision", "run"]
    assert speedup.decide.__doc__
    assert speedup.apply.__doc__


def test_the_order_of_application_is_the_one_whose_reasons_the_registry_states():
    order = {name: i for i, name in enumerate(NAMES)}
    assert order["cpu_matmul"] == 0
    assert order["fused_gelu"] < order["encoder_precision"] < order["embedding_cache"] < order["batch_size"]
    for earlier in ("precision", "encoder_precision", "lora"):  # parity is proven in the dtype and on the layers to be
        assert order[earlier] < order["attention"]
    assert order["lora"] < order["quantized_base"] < order["lora_base"] < order["fused_gelu"]
    assert order["precision"] < order["lora_base"] < order["attention"]
    assert order["attention"] < order["packing"] < order["masked_lm_head"]
    assert order["muon"] < order["sharding"]
    assert order["compile"] == len(NAMES) - 1
