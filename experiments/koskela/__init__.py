"""Koskela and Honkela: ADADP, the adaptive learning rate."""
