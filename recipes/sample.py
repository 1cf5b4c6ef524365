"""Sample antibodies from a trained generator: `hf-ext sample` as a script, for launchers.

python recipes/sample.py --help
"""

import sys

from hf_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
