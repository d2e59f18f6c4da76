"""Logistic regression in numpy, federated by Flower."""
