"""Version number of fedsim; the module imports nothing, so that anything may import it."""

VERSION = "0.1.0"
