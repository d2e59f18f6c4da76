"""The papers' figures and tables, each an experiment with its settings and expected figures."""
