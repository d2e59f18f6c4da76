"""NIID-Bench: federated averaging and its variants on clients that differ."""
