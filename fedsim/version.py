"""Version number of fedsim; the module imports nothing, so that packaging can read it."""

VERSION = "0.1.0"
