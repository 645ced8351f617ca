"""Chapter 09: compensation."""
