"""Adapters: a comparison of the trained factors of LoRA, under client-level privacy."""
