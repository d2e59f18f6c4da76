"""Secure aggregation: the server learns only the sum of a minimum number of clients' shares.

The protocol of Bonawitz et al. (2017) over Flower messages of one type, in four stages: public
keys, shares of each client's secrets, the masked vector, and the secrets that unmask the sum.
`protocol` has the format of the messages and the cryptography, `client` the replies of a client,
`server` the aggregation, and `fedsim.privacy.placement.SecureAggregation` the settings.
"""
