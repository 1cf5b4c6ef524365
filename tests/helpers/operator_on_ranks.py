"""What each process of `test_pde_setups.py` runs: `python operator_on_ranks.py FOLDER`, launched.

Writes to FOLDER, by rank 0: the gradients of an operator under DDP and FSDP2, each process having half of the rows, and
of one process that has all.
"""

import sys
from pathlib import Path

import torch
from operators import make_operator, make_samples
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_ext.pde.model import OperatorTransformer

ROWS = 4


def make() -> OperatorTransformer:
    torch.manual_seed(0)
    return make_operator().train()


def backward(module, batch, rows: slice, share: int) -> None:
    part = {name: value[rows] for name, value in batch.items()}
    (module(**part, num_items_in_batch=batch["labels"].numel()).loss * share).backward()


def gradients(model) -> dict[str, torch.Tensor]:
    whole = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().contiguous() for name, grad in whole.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    samples = make_samples(ROWS)
    labels = [torch.from_numpy(found["targets"]).flatten(1) for found in samples.values()]
    batch = {f"{name}_inputs": torch.from_numpy(found["inputs"]) for name, found in samples.items()}
    batch["labels"] = torch.stack(labels, dim=1)
    own = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)

    alone, replicated, sharded = (make() for _ in range(3))
    backward(alone, batch, slice(0, ROWS), 1)
    backward(DistributedDataParallel(replicated), batch, own, processes)
    mesh = distributed.init_device_mesh("cpu", (processes,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    backward(sharded, batch, own, processes)
    for name, model in (("alone", alone), ("ddp", replicated), ("fsdp2", sharded)):
        found = gradients(model)
        if rank == 0:
            save_file(found, folder / f"{name}.safetensors")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
