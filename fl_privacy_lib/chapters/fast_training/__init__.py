"""Chapter 04: what private training costs."""
