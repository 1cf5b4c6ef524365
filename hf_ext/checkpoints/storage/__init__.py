"""Where checkpoints stand: staged, committed by one rename, copied to a second place, deleted by their own run."""
