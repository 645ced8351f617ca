"""Benches, the check of a CUDA machine, and pictures: `python -m tools.NAME` from the repository's root."""
