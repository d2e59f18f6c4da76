"""The ClientApp and ServerApp for Flower's runtimes, and a loader for users' Flower apps."""
