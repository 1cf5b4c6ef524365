"""For tests alone: launched processes without a GPU train sharded (FSDP2, HSDP) over gloo, as GPUs would over NCCL.

On PYTHONPATH, python imports this before anything else. Accelerate 1.15 leaves FSDP out wherever it finds no
accelerator; the device by name, and the kind of launch that GPUs have, make it shard on the CPU.
"""

import os

if "LOCAL_RANK" in os.environ:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
