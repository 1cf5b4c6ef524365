"""What decisions rest on: facts of a model and its data, a few rows as a sample, and proof that numbers agree."""
