"""Benches, the check of a CUDA machine, and pictures: run them by `python -m tools.NAME`."""
