"""The parts that a training run is made of: each owns its state and takes what it needs."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .backends import Backend, check_optimizer, choose_backend
    from .checks import Checks, check_training
    from .early_stopping import CollapseAlarm, EarlyStopping, check_metric_on_rows
    from .embedding_cache import Embedded, EmbeddingCache, EmbeddingHost, encode_sequences
    from .evaluation import Evaluator, Given, MakeLoader, OnePass
    from .host import Carried, Host, Rows, name_evaluation_sets
    from .loaders import Loaders, naming_dead_workers, take_rows
    from .losses import Losses, LossFunction
    from .nan_guard import NanGuard
    from .optimizers import finish_optimizer
    from .overrides import BATCHES, EVALUATION_LOSS, find_override, find_own_loss
    from .run_plan import PlannedRun, plan_run, seed_process
    from .stop import Stopper, keep_from_workers
else:
    __getattr__, __dir__, __all__ = offer(__name__)
