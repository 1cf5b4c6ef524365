"""Tell what a folder of checkpoints goes on from, or convert a .pth: `hf-ext resume` as a script, for launchers.

python recipes/resume_check.py --help
"""

import sys

from hf_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["resume", *sys.argv[1:]]))
