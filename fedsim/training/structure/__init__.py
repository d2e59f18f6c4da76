"""The structure of models and losses: graphs whose nodes act on each example by itself."""
