"""A federation of real processes: its keys and certificates, starting and ending it."""

from __future__ import annotations
