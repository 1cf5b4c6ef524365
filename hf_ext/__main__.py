"""`python -m hf_ext`, for launchers: `accelerate launch -m hf_ext train`, `torchrun ... -m hf_ext train`."""

import sys

from hf_ext.cli import main

if __name__ == "__main__":  # not in the processes that prepare batches, where they are spawned
    sys.exit(main())
