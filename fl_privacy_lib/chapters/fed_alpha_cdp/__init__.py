"""Chapter 07: Fed-αCDP."""
