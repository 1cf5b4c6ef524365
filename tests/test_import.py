"""Importing hf_ext costs nothing and changes nothing."""

import json
import statistics
import subprocess
import sys

import pytest

import hf_ext

MEASURE = """
import sys, time
start = time.perf_counter()
import hf_ext
spent = time.perf_counter() - start
import json
print(json.dumps({"spent": spent, "heavy": sorted({"torch", "transformers", "numpy", "datasets"} & set(sys.modules))}))
"""

TRAINER = """
import json, torch
def read():
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.fp32_precision],
        "general": torch.backends.fp32_precision,
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled],
        "cuda": [torch.backends.cuda.matmul.fp32_precision, torch.cuda.is_initialized()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "seed": torch.initial_seed(),
    }
torch.manual_seed(5)
before = read()
import hf_ext.trainer, hf_ext.affinity.building
from transformers.models.esm.modeling_esm import EsmIntermediate
after = read()
print(json.dumps([before, after, EsmIntermediate.forward.__module__]))
"""


def run_fresh(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_importing_hf_ext_takes_less_than_300_ms_and_brings_nothing_heavy():
    runs = [json.loads(run_fresh(MEASURE)[0]) for _ in range(3)]
    assert statistics.median(run["spent"] for run in runs) < 0.3
    assert [run["heavy"] for run in runs] == [[], [], []]


def test_importing_the_trainer_changes_no_global_of_torch_and_patches_nothing():
    before, after, home = json.loads(run_fresh(TRAINER)[0])
    assert after == before
    assert home == "transformers.models.esm.modeling_esm"


def test_every_lazy_name_resolves_to_the_object_of_its_module():
    assert len(hf_ext._HOMES) >= 12
    for name in hf_ext._HOMES:
        assert getattr(hf_ext, name).__class__.__name__
    from hf_ext.trainer import FastTrainer

    assert hf_ext.FastTrainer is FastTrainer
    assert set(dir(hf_ext)) == {*hf_ext._HOMES, "__version__"}


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'FastTrainr'; it offers .*FastTrainer"):
        hf_ext.FastTrainr  # noqa: B018


NEEDED = """
import sys
from transformers import Trainer, TrainingArguments
before = {name.split(".")[0] for name in sys.modules}
import hf_ext.trainer
sys.path.insert(0, "recipes")
import max_speed
print(*sorted({name.split(".")[0] for name in sys.modules} - before))
"""


@pytest.mark.nightly
def test_the_recipe_imports_no_library_that_trainer_itself_does_not():
    """scipy and peft are among those that it does; matplotlib waits until a figure is drawn."""
    assert run_fresh(NEEDED)[0].split() == ["hf_ext", "max_speed"]


COLLECTED = """
import gc
from hf_ext.cli import quick_imports
counts = []
gc.callbacks.append(lambda phase, info: counts.append(phase))
with quick_imports():
    import statistics, email, http.client, asyncio
    inside = list(counts)
print(len(inside), gc.isenabled(), gc.get_freeze_count() > 10_000)
counts.clear()
kept = [[] for _ in range(100_000)]
print(len(counts) > 0)
"""


def test_nothing_is_collected_while_a_program_imports_and_all_is_afterwards():
    assert run_fresh(COLLECTED)[:2] == ["0 True True", "True"]
