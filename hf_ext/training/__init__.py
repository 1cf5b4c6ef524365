"""The parts that a training run is made of: each owns its state and takes what it needs."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .backends import Backend, DeepSpeed
    from .checks import Checks, CollapseAlarm, check_training
    from .early_stopping import EarlyStopping, check_metric_on_rows
    from .embedding_cache import Embedded, EmbeddingCache, EmbeddingHost, encode_sequences
    from .evaluation import Evaluator, Given, MakeLoader, OnePass
    from .fitting.finder import find_batch_size
    from .fitting.halving import Halving
    from .fsdp2 import Fsdp2
    from .host import BATCHES, EVALUATION_LOSS, Carried, Host, Rows, find_override, find_own_loss, name_evaluation_sets
    from .loaders import Loaders, take_rows
    from .losses import Losses, LossFunction
    from .nan_guard import NanGuard
    from .optimizers import check_optimizer, finish_optimizer
    from .run_plan import PlannedRun, plan_run, seed_process
    from .stop import Stopper, keep_from_workers, name_dead_workers
else:
    __getattr__, __dir__, __all__ = offer(__name__)
