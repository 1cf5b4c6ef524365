"""Which checkpoints stay, and whether a disk budget can hold them: pure arithmetic."""
