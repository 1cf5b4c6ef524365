"""Heads that are fitted on embeddings: ensembles, their members, layers, calibration and intervals."""
