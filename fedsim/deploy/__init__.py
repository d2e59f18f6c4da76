"""Deployment of a federation as networked processes: keys, certificates, policies and processes."""

from __future__ import annotations
