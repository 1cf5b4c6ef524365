"""The tests that need a GPU: `pytest -m gpu`, in the files that have any. Without one they are only collected."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .session import ROOT
from .work import Work

MARK = re.compile(r"\bpytest\.mark\.gpu\b")


def measure(work: Work) -> None:
    """Reports how many there are, passed, and were skipped, and which failed, with their errors."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")) if has_mark(path)]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", *files]
        has_gpu = work.device.type == "cuda"
        command += [f"--junitxml={report}"] if has_gpu else ["--collect-only"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        if done.returncode > 1:  # usage, collection; 1: tests failed
            raise SystemExit(f"pytest ended with {done.returncode}")
        if has_gpu:
            work.report(files=files, **read_report(report))
        else:
            number = len(re.findall(r"^\S+::\S+", done.stdout, re.MULTILINE))
            work.report(files=files, collected=number, not_run="no GPU")


def has_mark(path: Path) -> bool:
    """Whether a file has a test that needs a GPU; other files are not even imported."""
    return MARK.search(path.read_text(encoding="utf-8")) is not None


def read_report(path: Path) -> dict[str, Any]:
    """Counts and failures of pytest's JUnit file."""
    cases = [*ElementTree.parse(path).getroot().iter("testcase")]
    failed, skipped = [], []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind in ("failure", "error"):
            failed += [{"test": name, "error": str(each.get("message"))[:500]} for each in case.iter(kind)]
        skipped += [{"test": name, "reason": str(each.get("message"))[:200]} for each in case.iter("skipped")]
    passed = len(cases) - len({each["test"] for each in failed}) - len(skipped)
    return {"collected": len(cases), "passed": passed, "failed": failed, "skipped": skipped}
