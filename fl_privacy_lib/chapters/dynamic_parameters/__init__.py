"""Chapter 06: dynamic parameters."""
