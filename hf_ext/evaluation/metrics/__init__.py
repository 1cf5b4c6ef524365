"""Metrics of rows of each kind, each a function of how often every row counts."""
