"""One run and many: what a config builds, how it is driven, and what it leaves behind."""
