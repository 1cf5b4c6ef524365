"""The parts of a run that save: checkpoints, what a run continues from, model folders, and pushes to the Hub."""
