"""Units, tables and progress: how numbers are written, for every floor above."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .progress import (
        LOGGER,
        LiveProgress,
        describe_training,
        find_shortfall,
        is_watched,
        messages_above_bars,
        show_live,
        start_run_log,
    )
    from .tables import format_markdown_table, format_table, is_numeric, write_json
    from .units import (
        MISSING,
        NOT_MEASURED,
        capitalize,
        format_cell,
        is_finite,
        join_words,
        less_is_better,
        metric_name,
        metric_title,
        number,
        rounded,
        score,
        seconds,
        share,
        storage,
    )
else:
    __getattr__, __dir__, __all__ = offer(__name__)
