"""Adapters: the factors of LoRA that are trained, beside each other, under client-level privacy."""
