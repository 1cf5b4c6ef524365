"""Whether a run continues the one that wrote a checkpoint: facts of both, compared one by one."""
