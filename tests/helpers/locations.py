"""Where the tests, their helpers and the repository are."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
CPU_AS_GPUS = TESTS / "cpu_as_gpus"  # on PYTHONPATH, accelerate has FSDP on a CPU
