"""A map of private methods: which is the most accurate, by data, clients and epsilon."""
