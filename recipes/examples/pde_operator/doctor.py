"""Look before you train: what `hf-ext doctor` says of a run of train.py, whose arguments this script takes.

python recipes/examples/pde_operator/doctor.py --resolution 64 --hidden_size 384 --device a100
"""

from __future__ import annotations

import sys

from pde_operator.task import OperatorTask

from hf_ext import exit_on_errors
from hf_ext.doctor import examine


def main(argv: list[str] | None = None) -> int:
    """Prints the page; returns the exit status: 0 if the run would start, 1 if something would stop it."""
    return examine(OperatorTask(), argv)


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
