"""Chapter 10: what works."""
