"""Plans of rounds: correlated noise and random allocation, beside independent noise."""
