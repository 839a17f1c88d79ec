"""Initial weights of shared layers, and norms fitted to them."""
