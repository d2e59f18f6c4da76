"""Engines that run clients: Flower Grids for one process, for workers and for Flower's runtimes."""
