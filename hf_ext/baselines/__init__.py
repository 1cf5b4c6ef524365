"""What a model must beat on the same rows: constants, linear models, near rows, windows of residues."""
