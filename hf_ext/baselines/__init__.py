"""What a model must beat on the same rows: constants, linear models, near rows, windows of residues."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .fitted import (
        PRETRAINED_ROWS,
        TOKENS_PER_BATCH,
        Baselines,
        columns_of,
        embed_distinct,
        pooled_features,
    )
    from .logistic import fit_logistic
    from .residues import FITTERS
    from .ridge import solve_ridges
else:
    __getattr__, __dir__, __all__ = offer(__name__)
