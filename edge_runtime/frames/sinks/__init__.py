"""Sinks: where results go, one file for each kind, chosen by name in a box config."""
