"""Chapter 01: what an adversary at each tap reconstructs."""
