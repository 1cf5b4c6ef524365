"""The pages build with strict links: what leads nowhere, is reached from nowhere or does not parse, is an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hf_ext

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_every_exported_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = {*re.findall(r":: hf_ext\.(\w+)$", page, re.MULTILINE), *re.findall(r"`(\w+)`", page)}
    assert {*hf_ext.__all__} - named == set()


def test_the_pages_build_and_can_be_searched(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert pages >= {path.stem for path in DOCS.glob("*.md")} | {"search", "genindex"}
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert all(f'id="hf_ext.{name}"' in api for name in ("FastTrainer", "AffinityPredictor", "errors.TrainingStopped"))
    assert "oom_policy" in api  # a field of ours, with its help
    index = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("spearman", "calibr", "fsdp2"))
    assert 'href="start.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_page_with_a_mistake_does_not_build(tmp_path: Path) -> None:
    shutil.copy(DOCS / "conf.py", tmp_path / "conf.py")
    (tmp_path / "index.md").write_text("# A\n\n[b](absent.md)\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert "absent" in done.stderr
