"""The parts that a training run is made of: each owns its state, takes what it needs, and never sees the trainer."""
