"""How arguments are given: names, checks, presets, YAML files, the command line and its help page."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .checks import (
        ABOVE_ZERO,
        COUNT,
        FINITE,
        NOT_NEGATIVE,
        NUM_WORKERS,
        SEED,
        SHARE_BELOW_ONE,
        WIDTH,
        Range,
        check_choices,
        check_metric_name,
        check_ranges,
        check_types,
        field_types,
        members,
        ranges_in_types,
    )
    from .config_file import read_config
    from .parser import FastArgumentParser, parse_command
    from .presets import PRESETS, is_secret, name_nearest, preset_values
    from .training_fields import (
        FIRST_FLAGS,
        REQUIRE,
        Count,
        EvaluatingArguments,
        LoraArguments,
        PredictingArguments,
        SavingArguments,
        SpeedArguments,
        StepArguments,
        option,
        training_names,
    )
else:
    __getattr__, __dir__, __all__ = offer(__name__)
