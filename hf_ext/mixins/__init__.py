"""What FastTrainer adds to Trainer, one concern per mixin."""
