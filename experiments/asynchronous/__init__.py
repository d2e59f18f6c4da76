"""What buffered asynchronous rounds are worth, in the time of simulated devices."""
