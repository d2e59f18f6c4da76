"""A map of private methods: which of them ends highest, by data, clients and epsilon."""
