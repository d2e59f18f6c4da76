"""A federated round: the cohort, its messages, the aggregation of replies, and the engines.

Begin reading with `private_rounds` (the stages of a round, in order), then `participants` (who is
asked), `exchange` (with what), `replies` (how answers are read) and `aggregation.server_sum` (how
they are summed). `dp_fedavg` builds the parts of a round from keywords; `client_settings` holds
those about clients, and `accounting` charges a round to the ledger. Other aggregations and `extras`
change one stage each. `rounds` is the loop over rounds. `engines` run the clients: read
`engines.local` and `engines.dispatch` first.
"""
