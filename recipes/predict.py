"""Predict with a trained model: `hf-ext predict` as a script, for launchers.

python recipes/predict.py --help
"""

import sys

from hf_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
