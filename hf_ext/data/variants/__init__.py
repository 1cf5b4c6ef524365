"""Rows that are variants of one protein: which protein, what they substitute in it, and the numbers of that."""
