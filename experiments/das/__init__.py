"""Das et al.: clipped and normalised DP-FedAvg."""
