"""Runs: the objects a config describes, driving one run or a sweep, and the files on disk.

To read it, begin with `runner` (`fedsim.run`), `resolve` (from a config to objects) and `session`
(one run in progress, and what it writes after each round). `factories` and `data_split` make the
objects; `preflight` checks a run before anything is written. `directory`, `run_lock` and
`checkpoints` write to disk; `record`, `saved` and `summary` read it afterwards; `resume`
checks that a resumed run matches the one it resumes. `sweep` makes many runs.
"""
