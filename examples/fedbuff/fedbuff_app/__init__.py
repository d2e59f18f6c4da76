"""Logistic regression in numpy, federated by Flower in buffered asynchronous rounds."""
