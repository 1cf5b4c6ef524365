"""Processes that a launcher started: they train together, or not at all. How they agree is in `team`."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .launched import (
        check_fsdp,
        check_parallelism,
        check_together,
        import_deepspeed,
        need_cpu_backend,
        need_gloo,
        refuse_several,
    )
    from .sharding import (
        fsdp_version,
        num_elements,
        offload_device,
        own_shard,
        read_fsdp2,
        replaces_optimizer,
        splits_weights,
        whole_weights,
        zero_stage,
    )
    from .team import Team, do_on_main, release_group, share_group
else:
    __getattr__, __dir__, __all__ = offer(__name__)
