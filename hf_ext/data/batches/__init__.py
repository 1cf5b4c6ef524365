"""From rows to batches: tokens, masks, budgets of tokens, streams."""
