"""Importing hf_ext costs nothing and changes nothing; a package that is asked for names the command that brings it."""

import json
import subprocess
import sys

import pytest

import hf_ext
from hf_ext.errors import MissingDependencyError
from hf_ext.optional import import_problem, require

MEASURE = """
import sys, time
start = time.perf_counter()
import hf_ext, hf_ext.optional, hf_ext.hardware
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
import hf_ext.trainer, hf_ext.property.building
from transformers.models.esm.modeling_esm import EsmIntermediate
after = read()
print(json.dumps([before, after, EsmIntermediate.forward.__module__]))
"""


def run_fresh(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_importing_hf_ext_takes_less_than_300_ms_and_brings_nothing_heavy():
    runs = [json.loads(run_fresh(MEASURE)[0]) for _ in range(3)]
    assert min(run["spent"] for run in runs) < 0.3
    assert [run["heavy"] for run in runs] == [[], [], []]


def test_arguments_need_no_tables_so_that_help_is_quick():
    code = "import sys, hf_ext.arguments, hf_ext.data.arguments, hf_ext.models.arguments, hf_ext.property.arguments"
    assert run_fresh(f"{code}; print('pyarrow' in sys.modules, 'torch' in sys.modules)")[0] == "False False"


def test_importing_the_trainer_changes_no_global_of_torch_and_patches_nothing():
    before, after, home = json.loads(run_fresh(TRAINER)[0])
    assert after == before
    assert home == "transformers.models.esm.modeling_esm"


def test_every_lazy_name_resolves_and_an_unknown_one_says_what_there_is():
    names = {*dir(hf_ext)} - {"__version__"}
    assert len(names) >= 12
    assert all(getattr(hf_ext, name).__class__.__name__ for name in names)
    from hf_ext.trainer import FastTrainer

    assert hf_ext.FastTrainer is FastTrainer
    with pytest.raises(AttributeError, match=r"no attribute 'FastTrainr'; it offers .*FastTrainer"):
        hf_ext.FastTrainr  # noqa: B018


def test_a_package_that_is_asked_for_comes_or_its_extra_the_purpose_and_the_reason_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert import_problem("json") is None
    assert require("json", "lora", "--lora").dumps([]) == "[]"
    assert import_problem("hf_ext_no_such_package.inner") == "is not installed"
    with pytest.raises(MissingDependencyError, match=r"needed for --lora .*pip install \"hf_ext\[lora\]\""):
        require("hf_ext_no_such_package", "lora", "--lora")
    for name, source, problem in (
        ("broken_name", "import json\njson.no_such", "AttributeError: module 'json' has no attribute 'no_such'"),
        ("broken_cuda", "assert False, 'Torch not compiled with CUDA'", "AssertionError: Torch not compiled"),
        ("broken_parent", "import json.no_such_part", "ModuleNotFoundError: No module named 'json.no_such_part'"),
    ):
        (tmp_path / f"{name}.py").write_text(source, encoding="ascii")
        assert str(import_problem(name)).startswith(problem)
        with pytest.raises(ImportError, match=rf"is installed, but does not import here \({problem}"):
            require(name, "faesm", "--attention faesm")
    import_problem.cache_clear()
