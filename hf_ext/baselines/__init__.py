"""What a model must beat on the same rows: constants, linear models, near rows, windows of residues."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .embedded import TOKENS_PER_BATCH, embed_distinct, pooled_features
    from .fitted import PRETRAINED_ROWS, Baselines, columns_of
    from .logistic import fit_logistic
    from .residues import FITTERS
    from .ridge import solve_ridges
    from .zero_shot import (
        SubstitutionTable,
        add_zero_shot,
        check_wild_type,
        load_masked_lm,
        score_rows,
        score_substitutions,
        zero_shot_table,
    )
else:
    __getattr__, __dir__, __all__ = offer(__name__)
