"""Which fedsim this is: read by whatever says so, and imports nothing."""

VERSION = "0.1.0"
