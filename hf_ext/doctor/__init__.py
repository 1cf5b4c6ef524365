"""Before a run: what this machine can do, what the run would take, what is off, and the remedy."""
