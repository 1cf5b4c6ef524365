"""Tables and plots of a run. Imports no more than numpy; matplotlib waits for the first plot."""

from __future__ import annotations

from .charts import plot_loss, plot_scatter
from .tables import format_markdown_table, format_table

__all__ = ["format_markdown_table", "format_table", "plot_loss", "plot_scatter"]
