"""Heads that are fitted on embeddings: ensembles, their members, layers, calibration and intervals."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .calibration import calibrate
    from .ensemble import MEMBER_HEADERS, describe_ensemble, fit_ensemble, member_rows
    from .intervals import describe_basis, fit_intervals, half_width, scales_help, score_intervals
    from .layers import choose_layers, describe_layers, find_known_layers, why_last
    from .likelihood import resolve_likelihood, set_wild_type
    from .resolving import AUTO, StopIdle, may_stop, resolve_head
    from .spread import fit_spread, mix_spreads, require_spread, score_spread
else:
    __getattr__, __dir__, __all__ = offer(__name__)
