"""What a checkpoint holds of a run: weights, optimizer and schedule, random states, progress; out and back again."""
