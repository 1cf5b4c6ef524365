"""Parts of `benchmarks/gpu_session.py`: what is measured on a card that nobody has measured yet."""
