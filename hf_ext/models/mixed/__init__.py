"""Heads of several kinds, weighed."""
