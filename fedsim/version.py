"""Which fedsim this is: read by whatever says so, and imports nothing."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
