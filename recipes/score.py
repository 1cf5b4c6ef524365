"""Score trained models on labelled rows, and compare them: `hf-ext evaluate` as a script, for launchers.

python recipes/score.py --help
"""

import sys

from hf_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
