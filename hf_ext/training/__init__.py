"""The parts that a training run is made of: each owns its state and takes what it needs."""
