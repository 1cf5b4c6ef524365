"""What a training step takes, before it is taken: a ledger of allocations, on tensors without memory."""
