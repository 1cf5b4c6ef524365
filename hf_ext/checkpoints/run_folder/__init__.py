"""The folder of a run: fit to be written to, held by one run at a time, and what a finished model in it promises."""
