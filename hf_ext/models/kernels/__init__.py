"""Kernels: attention, packing and their bridges, and what puts them into models of transformers."""
