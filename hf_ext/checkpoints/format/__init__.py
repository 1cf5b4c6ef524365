"""What a checkpoint is on disk: files of tensors and trees, a manifest over them, and the folder they make."""
