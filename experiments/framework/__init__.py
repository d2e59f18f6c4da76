"""Framework of experiments: what one is (`base`), running it (`run`), judging it (`judge`)."""
