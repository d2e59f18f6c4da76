"""NIID-Bench: federated averaging and its variants on heterogeneous clients."""
