"""What is done with a finished model: predict, evaluate and compare, list and convert checkpoints."""
