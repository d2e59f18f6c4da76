"""Secure aggregation: the server learns the sum of at least so many clients' shares, and no share.

The protocol of Bonawitz et al. (2017) over Flower messages of one type, in four stages: public
keys, shares of each client's secrets, the masked vector, and what removes the masks of the sum.
`primitives` is the cryptography, `client` what a client answers, `server` the aggregation.
"""
