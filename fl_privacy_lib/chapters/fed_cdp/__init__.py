"""Chapter 05: Fed-CDP's accuracy."""
