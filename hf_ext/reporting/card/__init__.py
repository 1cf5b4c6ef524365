"""The model card of a run: README.md with a verdict, scores, data, training, limits, and how to load the model."""

from .writing import write_card

__all__ = ["write_card"]
