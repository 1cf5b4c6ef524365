"""What one process does for all: its result, and its error, shared by every process of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from .disk import describe_failure, is_disk_failure
from .errors import DiskFailure, HfExtError, RunEnded


def do_on_main(args: Any, work: Callable[[], Any]) -> Any:
    """What `work`, called by the main process alone, returns; on all processes. So is what it raises.

    Args:
        args: `TrainingArguments`; all processes of a run call this.
        work: its result goes to the other processes, so it must be plain.

    Raises:
        HfExtError, RunEnded: from `work`.
        DiskFailure: instead of an OSError of the disk's.
    """
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = work()
        except (HfExtError, RunEnded) as error:
            outcome[1] = error
        except OSError as error:
            if not is_disk_failure(error):
                raise
            outcome[1] = DiskFailure(describe_failure(error, error.filename or args.output_dir))
    if args.world_size > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
