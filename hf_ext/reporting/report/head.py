"""The head that a search chose, and what else it tried."""

from __future__ import annotations

from .. import units
from ..head_search import HEADERS, candidate_rows, error_name, head_name
from .blocks import Block, Fold, Paragraph, Table
from .run_files import RunFiles
from .values import as_dict


def head_blocks(run: RunFiles) -> list[Block]:
    """A sentence and a table of all candidates; nothing where no search was made."""
    found = as_dict(run.results.get("head_search"))
    if not found:
        return []
    text = (
        f"The head is {head_name(found['chosen'])}: chosen among {len(found['tried'])} by validation on the cached "
        f"embeddings, in {units.seconds(found['seconds'])}. A ridge on the same embeddings has "
        f"{units.format_cell(found['ridge_error'])} where the best candidates have the errors below."
    )
    error = error_name(str(found["metric"]))
    caption = f"Error: {error} on {found['num_held_out']:,} rows that a candidate was not trained on."
    return [Paragraph(text), Fold("All candidates", [Table(HEADERS, candidate_rows(found), caption)])]
