"""One run and many: what a config builds, how it is driven, and what it leaves behind.

To read it, begin with `runner` (`fedsim.run`), `resolve`, what a config becomes, and `session`, one
run in progress and what it writes after each round. `factories` and `data_split` make the objects,
`preflight` refuses before anything is written. `directory`, `run_lock` and `checkpoints` are what
lies on disk, `record`, `saved` and `summary` what is read of it afterwards, `earlier_runs` what a
resumed run must have in common with it. `sweep` makes many runs.
"""
