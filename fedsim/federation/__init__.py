"""A round: who takes part, what they are asked, what becomes of it, and where clients run.

To read it, begin with `private_rounds` (a round's stages in their order), then `participants`,
`exchange`, `replies` and `aggregation.server_sum`: who is asked, with what, how replies are read,
what becomes of them. `dp_fedavg` makes the parts of a round from keywords, of which
`client_settings` are those about clients; `accounting` charges it.
Other aggregations and `extras` change one stage each. `rounds` is the loop, `engines` where clients
run: `engines.local` and `engines.dispatch` first.
"""
