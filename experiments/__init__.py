"""Experiments that reproduce papers' figures and tables, with settings and expected figures."""
