"""Wheel and source archive: what is in them, and that all of it runs where there is no clone."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from locations import ROOT

from hf_ext import __version__

NAME = f"hf_ext-{__version__}"
SOURCES = ["hf_ext", "recipes", "accelerate_configs", "launch"]
SHIPPED = ["recipes/configs", *SOURCES[2:]]
FILES = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def build(clone: Path, hook: str) -> Path:
    """Builds as pip does, with the setuptools that are installed; returns the archive."""
    code = f"from setuptools import build_meta as backend; print(backend.{hook}('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return clone / "dist" / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build(clone, "build_wheel")) as wheel:
        wheel.extractall(folder)
    return folder


def run_from(path: Path, *words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_holds_the_package_and_files_to_launch_with_and_no_recipe(installed: Path) -> None:
    assert sorted(path.name for path in installed.iterdir()) == ["hf_ext", f"{NAME}.dist-info"]
    inside = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_ext").rglob("*.py")}
    launched = {f"hf_ext/launch/{path.name}" for path in (ROOT / "launch").glob("*.*") if path.suffix != ".md"}
    settings = {f"hf_ext/{path.relative_to(ROOT)}" for name in SHIPPED for path in (ROOT / name).glob("*.yaml")}
    assert len(launched) == 5
    assert len(settings) == 25
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_ext/reporting/templates").iterdir()}
    held = {name for name in inside if name.startswith("hf_ext/")}
    assert held == {*code, *launched, *settings, *pages, "hf_ext/py.typed", "hf_ext/hardware.csv"}


def test_the_metadata_name_version_license_command_and_extras(installed: Path) -> None:
    info = installed / f"{NAME}.dist-info"
    metadata = message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("hf_ext", "0.1.0", "Apache-2.0")
    assert (metadata["Requires-Python"], metadata["License-File"]) == (">=3.11", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"docs", "dev", "flash", "deepspeed"} <= {*metadata.get_all("Provides-Extra")}
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) >= 20
    assert [line for line in needed if line.startswith("torch")] != []
    commands = (info / "entry_points.txt").read_text().split("\n")
    assert "hf-ext = hf_ext.cli:main" in commands
    assert "hf_ext = hf_ext.cli:main" in commands[commands.index("[pipx.run]") :]


def test_an_editable_install_has_the_files_of_the_clone(clone: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(clone, "build_editable")) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import importlib.util as u, site, sys\nsite.addsitedir(sys.argv[1])\n"
        "for name in ('hf_ext', 'hf_ext.cli'):\n"
        "    print(u.find_spec(name).origin)\n"
        "from hf_ext.files import find_shipped\nprint(find_shipped('gb1.yaml', 'recipes/configs'))"
    )
    # -S: not the site-packages of this environment, where another clone may be installed
    found = run_from(tmp_path, "-S", "-c", code, str(tmp_path / "site"), cwd=tmp_path).split()
    names = ["hf_ext/__init__.py", "hf_ext/cli.py"]
    assert found == [str(clone / name) for name in [*names, "recipes/configs/gb1.yaml"]]


def new_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel, whose other packages are those of this one; returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Such a line adds a folder, and does not read the .pth files in it: a clone that is installed here stays out.
    (site / "dependencies.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return folder / "bin"


@pytest.mark.nightly
def test_the_wheel_that_the_source_archive_builds_runs_the_demo_in_a_new_environment(
    clone: Path, tmp_path: Path
) -> None:
    for name in ("benchmarks", "docs", "tests"):
        (clone / name).mkdir(exist_ok=True)
    source = build(clone, "build_sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    bin_ = new_environment(tmp_path / "environment", build(tmp_path / NAME, "build_wheel"))
    away = tmp_path / "away"
    away.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [str(bin_ / words[0]), *words[1:]], cwd=away, env=clean, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    assert str(tmp_path) in run("python", "-c", "import hf_ext; print(hf_ext.__file__)")
    assert "--help all" in run("hf-ext", "train", "--help")
    run("hf-ext", "train")
    results = json.loads((away / "outputs" / "affinity" / "all_results.json").read_text())
    assert results["command"] == "hf-ext train"
    assert "checkpoint-" in run("hf-ext", "resume", "outputs/affinity")
    assert "Wrote" in run("hf-ext", "report", "--run", "outputs/affinity")
    assert "ArgumentError" in run("hf-ext", "train", "--config", "gb2.yaml", status=1)
    assert "data/gb1.csv.gz" in run("hf-ext", "train", "--config", "gb1.yaml", status=1)
    launched = ("-m", "accelerate.commands.launch", "--config_file", run("hf-ext", "--path", "cpu.yaml").strip())
    launched += ("--multi_gpu", "--num_processes", "2")
    run("python", *launched, "-m", "hf_ext", "mlm", "--max_steps", "3")
    record = json.loads((away / "outputs" / "mlm" / "all_results.json").read_text())
    assert record["command"] == "accelerate launch --quiet -m hf_ext mlm --max_steps 3"
