"""For people: inspecting, merging and migrating checkpoints; no run needs these."""
