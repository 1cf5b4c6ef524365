"""Tables and plots of a run. Imports no more than numpy; matplotlib waits for the first plot."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .batch_counts import flops_coefficients
    from .charts import confusion_chart, is_drawn, plot_loss, plot_scatter, position_chart, write_png
    from .data_section import describe_inputs, describe_repeated, summarize_data
    from .page import PLACEHOLDER, Block, Code, Page, Points, Table, Text, page_record
    from .record import (
        Audit,
        CommonRecord,
        DataRecord,
        Facts,
        Leaks,
        PlanRecord,
        RunRecord,
        Score,
        SplitRecord,
        Throughput,
        VerdictRecord,
        from_json,
        to_json,
    )
    from .report import write_card, write_report
    from .run_files import read_object, read_record, read_run
    from .run_record import RunClockCallback, absolute_if_local, record_run
    from .scores import (
        REQUIRED_HEADERS,
        fit_notes,
        index_scores,
        required_rows,
        resampled,
        score_blocks,
        score_numbers,
        score_table,
        verdict_limits,
    )
    from .speed_line import SpeedLine, StepProfiler, read_baseline
    from .throughput import ThroughputCallback, peak_bytes
else:
    __getattr__, __dir__, __all__ = offer(__name__)
