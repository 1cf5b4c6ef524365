"""What a training step takes, before it is taken: a ledger of allocations, on tensors without memory."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .forecast import MemoryModel, TrainConfig, affinity_batch, masked_lm_batch
    from .out_of_memory import DidNotFit, attempt
    from .probe import tensors_in
    from .report import NUMERICS, MemoryReport, Switch, format_memory, report_memory
    from .stored import WEIGHT_BYTES, optimizer_bytes, trained
else:
    __getattr__, __dir__, __all__ = offer(__name__)
