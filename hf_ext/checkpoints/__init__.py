"""Checkpoints that survive being killed, and continue exactly."""
