"""Availability means that the import works, and a package that is asked for names the command that brings it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.errors import MissingDependencyError
from hf_ext.optional import import_problem, require

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts a one-file package on the path; every test uses its own name, since answers are kept per process."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="ascii")
        return name

    yield write
    import_problem.cache_clear()


def test_a_package_imports_or_is_not_installed():
    assert import_problem("json") is None
    assert import_problem("hf_ext_no_such_package.inner") == "is not installed"


def test_an_installed_package_that_does_not_import_is_not_available_and_keeps_the_reason(package):
    for name, source, problem in (
        ("broken_name", "import json\njson.no_such", "AttributeError: module 'json' has no attribute 'no_such'"),
        ("broken_cuda", "assert False, 'Torch not compiled with CUDA'", "AssertionError: Torch not compiled"),
        ("broken_parent", "import json.no_such_part", "ModuleNotFoundError: No module named 'json.no_such_part'"),
    ):
        assert str(import_problem(package(name, source))).startswith(problem)


def test_a_package_is_imported_once_however_often_it_is_asked_about(package, tmp_path):
    name = package("counted", f"open({str(tmp_path / 'count')!r}, 'a').write('x')\nraise ImportError('no')")
    assert [import_problem(name), import_problem(name)] == ["ImportError: no"] * 2
    assert (tmp_path / "count").read_text() == "x"


def test_require_returns_the_module_or_names_the_extra_the_purpose_and_the_reason(package):
    assert require("json", "lora", "--lora").dumps([]) == "[]"
    with pytest.raises(MissingDependencyError, match=r"needed for --lora .*pip install \"hf_ext\[lora\]\""):
        require("hf_ext_no_such_package", "lora", "--lora")
    name = package("broken_required", "raise ImportError('built for torch 2.4')")
    with pytest.raises(ImportError, match=r"is installed, but does not import here \(ImportError: built for torch"):
        require(name, "faesm", "--attention faesm")


def test_importing_hf_ext_optional_and_hardware_imports_neither_torch_nor_a_package():
    code = "import sys, hf_ext.optional, hf_ext.hardware; print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert run.stdout.strip() == "set()", run.stderr
