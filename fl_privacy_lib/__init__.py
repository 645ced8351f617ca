"""Gradient leakage and private federated learning, reproduced from five papers.

The package is one route that a gradient takes, from an example at a client to the
global model at the server. Read it from the ground floor up: ``models``, ``metrics``,
``sampling``, ``data``; then ``accounting``, ``defenses``, ``federated``, ``attacks``,
``audit``; ``reproduction`` puts them together for the notebooks. Imports run downwards only.
"""

__version__ = "0.1.0"
