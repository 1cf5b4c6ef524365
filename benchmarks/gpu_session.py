r"""Eight minutes on a card that nobody has measured: one command, numbers after each round of each of its parts.

    python benchmarks/gpu_session.py              # writes benchmarks/results/gpu_session_CARD.json
    python benchmarks/gpu_session.py --parts encoding memory --minutes 3
    python benchmarks/gpu_session.py --size toy   # tiny shapes, also on a CPU, in about 90 seconds: does it run?

Each part is a process of its own with a time limit, an even share of what is left. What it measures it measures in
rounds, and each stands in the file as soon as it has ended; what does not fit is left out by rounds, and begun again
where later parts leave time. A part that fails, crashes, hangs or is out of memory is written down with its reason,
and the next begins. Started again on the same commit, it goes on with what is missing. The exit code is 1 where a part
did not finish.

faesm's flash kernel and the package flash-attn are tested and measured where flash-attn is installed: pip install
--no-build-isolation -e ".[flash]" takes nvcc, or a wheel for this torch. Elsewhere they read "not measured".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Nothing heavy: torch takes memory on the card, and a part has seconds. Parts import it, each in its process.
from gpu_rounds import CUT, ROOT, first_line, run_parts, save_session

from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.optional import installed_version

BENCHMARKS = ROOT / "benchmarks"
PARTS = ("tests", "full_esm2", "lora_esm2", "memory", "encoding", "full_esmc", "generator", "processes")
FINISHED, BEGUN = "finished", "begun"
CUT_CODE = 75  # EX_TEMPFAIL: a part that ended by itself, because no further round would have fitted
GRACE_S = 4.0  # of a part's limit, for its end: of its own accord in the first half, then by force
DETECTION_S = 60.0
LOG_LINES = 30
DETECT = """import json
from hf_ext.hardware import detect_hardware
found = detect_hardware()
print(json.dumps({"device": found.name, "kind": found.kind, "memory_gib": found.memory_gib}))"""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy: tiny shapes, no numbers.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="All by default, in this order.")
    parser.add_argument("--output", type=Path, help="In benchmarks/results, named by the card; of a toy in outputs/.")
    parser.add_argument("--minutes", type=float, default=8.0, help="Of the whole session.")
    return parser.parse_args(words)


# --- one part -------------------------------------------------------------------------------------------------------


def make_command(part: str, size: str, output: Path, ends: float) -> list[str]:
    """The words after `python` of a part."""
    return [str(BENCHMARKS / "gpu_parts.py"), part, "--size", size, "--session", str(output), "--ends", str(ends)]


def run_part(part: str, size: str, output: Path, limit_s: float) -> str:
    """Runs a part and writes into the session how it ended, after how long and why; returns the first.

    Never takes longer than `limit_s`, but where the system does not end a process.
    """
    began = time.monotonic()
    session = json.loads(output.read_text(encoding="utf-8"))
    entry = session["parts"].setdefault(part, {"seconds": 0.0, "result": {}})
    entry |= {"status": BEGUN, "reason": ""}
    save_session(output, session)
    print(f"{part}: at most {limit_s:.0f} s", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [sys.executable, *make_command(part, size, output, began + limit_s - GRACE_S)]
        code = run_limited(command, log, limit_s)
        log.seek(0)
        lines = [line for line in log.read().replace(str(ROOT), "PROJECT").splitlines() if line.strip()]
    session = json.loads(output.read_text(encoding="utf-8"))
    entry = session["parts"][part]
    last = {"reason": first_line(lines[-1] if lines else ""), "log_end": lines[-LOG_LINES:]}
    now = entry["result"].pop("now", "its start")
    if code == 0:
        entry |= {"status": FINISHED, "log_end": []}
    elif code == CUT_CODE:
        entry |= {"status": CUT, "reason": f"no time for {now}", "log_end": []}
    elif code is None:
        entry |= {"status": "timed out", **last, "reason": f"in {now}"}
    else:
        entry |= {"status": f"failed with exit code {code}", **last}
    entry["seconds"] = round(entry["seconds"] + time.monotonic() - began, 1)
    save_session(output, session)
    print(f"{part}: {entry['status']} {entry['reason']} after {time.monotonic() - began:.0f} s", flush=True)
    return entry["status"]


def run_limited(command: list[str], log: Any, limit_s: float) -> int | None:
    """The exit code of a part's command; None where it had to be ended. What it started ends with it."""
    if limit_s <= GRACE_S:
        return None
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # where nothing can be reached, asking takes long
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Trainer would split batches over all cards.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s - GRACE_S / 2)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # its ranks and workers too, which may live on
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that waits for the driver cannot be ended
            process.wait(GRACE_S / 4)


# --- the session ----------------------------------------------------------------------------------------------------


def detect_machine() -> dict[str, Any]:
    """What this machine computes on. In a process of its own, which a driver may hold up.

    Raises:
        ArgumentError: the device does not answer.
    """
    words = [sys.executable, "-c", DETECT]
    given: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": DETECTION_S}
    try:
        return json.loads(subprocess.run(words, **given).stdout.splitlines()[-1])
    except (subprocess.SubprocessError, IndexError, ValueError) as error:
        said = first_line(str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2])
        raise ArgumentError(f"The device does not answer torch: {said}. See whether `nvidia-smi` ends.") from error


def describe_session(size: str, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, and on what; a file of another is never overwritten."""
    commit = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        code = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a downloaded folder
        code = "unknown"
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "flash-attn")
    versions = {name: installed_version(name) for name in names}
    return {"size": size, "machine": machine, "commit": code, "versions": versions, "parts": {}}


def open_session(path: Path, session: dict[str, Any]) -> dict[str, Any]:
    """The session with the parts that ran on the same commit, if the file has some.

    Raises:
        ArgumentError: it holds something else, or a session of another machine or size.
    """
    if not path.exists():
        return session
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        is_same = (kept["machine"], kept["size"]) == (session["machine"], session["size"])
        parts = {name: part for name, part in kept["parts"].items() if part["status"]}
        is_current = kept["commit"] == session["commit"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: holds no session ({type(error).__name__}). Give another --output.") from error
    if not is_same:
        raise ArgumentError(f"{path}: a session of another machine or --size. Give another --output, or move it away.")
    return {**session, "parts": parts if is_current else {}}


def name_output(size: str, machine: dict[str, Any]) -> Path:
    """Where a session goes that names no file: one for each card."""
    card = re.sub(r"[^a-z0-9]+", "_", machine["device"].lower())
    folder = BENCHMARKS / "results" if size == "full" else ROOT / "outputs"
    return folder / f"gpu_session_{card if size == 'full' else 'toy'}.json"


def main(words: list[str] | None = None) -> int:
    """Runs the parts that are not done; 1 where one did not finish."""
    began = time.monotonic()
    args = parse_arguments(words)
    machine = detect_machine()
    if machine["kind"] != "cuda" and args.size == "full":
        raise ArgumentError("No GPU: torch sees no CUDA device. --size toy says whether the session runs, on a CPU.")
    output = args.output or name_output(args.size, machine)
    session = open_session(output, describe_session(args.size, machine))
    done = {part for part, entry in session["parts"].items() if entry["status"] == FINISHED}
    left = [part for part in PARTS if part in args.parts and part not in done]
    print(f"{machine['device']}, {session['commit']} -> {output}: {', '.join(left) or 'all parts finished before'}")
    if "tests" in left and not session["versions"]["flash-attn"]:
        print("flash-attn is not installed: it and faesm are not measured. pip install -e '.[flash]' brings it.")
    for part in left:  # a side that failed is tried again
        session["parts"].get(part, {"result": {}})["result"].pop("problems", None)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_session(output, session)
    budget_s = 60 * args.minutes - (time.monotonic() - began)
    run_parts(left, budget_s, lambda part, limit_s: run_part(part, args.size, output, limit_s))
    ended = json.loads(output.read_text(encoding="utf-8"))["parts"]
    return 0 if all(ended[part]["status"] == FINISHED for part in args.parts) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the part under way is ended too
    with exit_on_errors():
        sys.exit(main())
