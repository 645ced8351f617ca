"""Chapter 03: ε, counted as the papers count it and as it can be proved."""
