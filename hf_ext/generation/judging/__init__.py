"""Judges what a generator drew: copies, predicted affinities, the verdict."""
