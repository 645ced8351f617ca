"""Chapter 08: FedSel, local privacy in two stages."""
