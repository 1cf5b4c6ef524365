"""Embeddings that are computed once: the store, the loop that fills it, the dataset that reads it."""
