"""A against B: the same recipe, data and seeds in fresh interleaved processes, with intervals and criteria."""
