"""The structure of models and losses: graphs whose nodes treat each example by itself."""
