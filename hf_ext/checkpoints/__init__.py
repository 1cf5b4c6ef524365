"""Checkpoints that survive being killed, and continue exactly."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .compare import STEP_SIZE, compare_runs, refuse, refuse_asked
    from .finished_model import (
        MEMBERS,
        MODEL_MANIFEST,
        PART,
        WEIGHTS,
        check_finite,
        check_model,
        find_members,
        find_model,
        list_files,
        not_finite,
        open_model,
        read_members,
        write_members,
        write_model_manifest,
    )
    from .free_to_differ import FREE_TO_DIFFER
    from .manifest import (
        CHECKPOINT_NAME,
        PROGRESS,
        Stored,
        check_unlisted,
        hash_file,
        is_folder,
        is_ours,
        read_json,
        verify,
    )
    from .mirror import MirroredStore
    from .retention import (
        GB,
        SMALL_FILES_BYTES,
        Entry,
        Sizes,
        bound_sizes,
        check_budget,
        ends_nth_epoch,
        export_bytes,
        needed_bytes,
        read_policy,
        steps_beyond_limit,
        steps_for_room,
    )
    from .run_facts import describe_run
    from .run_lock import check_folder, find_other_run, local_folder, lock_folders, make_folder, run_folder
    from .store import STAGING, CheckpointStore
    from .weights import (
        keep_source_digests,
        load_weights,
        save_checkpoint_weights,
        save_weights,
    )
else:
    __getattr__, __dir__, __all__ = offer(__name__)
