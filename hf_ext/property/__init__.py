"""The affinity task: arguments, building the model for the data, and scoring it."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .arguments import AffinityArguments, EmbedArguments, EvaluateArguments, PredictArguments
    from .building import build_collator, model_settings, read_towers, resolve_training
    from .measure import scored_names
    from .prediction_file import (
        ACQUISITION,
        BOUND_SIGNS,
        HIGH,
        LOW,
        RANK,
        STD,
        check_predictions,
        find_output,
        find_rejected,
        interval_columns,
        read_predictions,
        refuse_added,
        std_column,
        write_predictions,
    )
    from .predictor import AffinityPredictor, find_device, load_model, predicting, training_arguments
    from .results import PREDICTIONS, baseline_file
    from .rows import bind_vectors, check_splits, check_threshold, describe_groups
    from .scoring import LIMITS_NOTE, RANKING_NOTE, Compared
    from .task import TASK
else:
    __getattr__, __dir__, __all__ = offer(__name__)
