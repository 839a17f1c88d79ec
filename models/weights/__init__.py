"""Weights files: found, read without running anything, held against the architecture."""
