"""`--head auto`: a head, and how it is trained, chosen by validation on the cached embeddings."""
