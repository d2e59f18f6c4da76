"""Aggregations: what the clients of a round are asked, and how their replies are combined."""
