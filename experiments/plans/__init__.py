"""Release plans: correlated noise and random allocation, compared with independent noise."""
