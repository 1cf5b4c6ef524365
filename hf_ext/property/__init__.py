"""The affinity task: arguments, building the model for the data, and scoring it."""
