"""Tables and plots of a run. Imports no more than numpy; matplotlib waits for the first plot."""

from __future__ import annotations

from ..text.tables import format_markdown_table, format_table
from .charts import plot_loss, plot_scatter

__all__ = ["format_markdown_table", "format_table", "plot_loss", "plot_scatter"]
