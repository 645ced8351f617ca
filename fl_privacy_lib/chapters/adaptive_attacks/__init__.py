"""Chapter 02: attackers who know the defence."""
