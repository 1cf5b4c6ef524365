"""Models: encoders in towers, and a head."""
