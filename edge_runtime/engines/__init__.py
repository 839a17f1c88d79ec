"""Engines by name, each an architecture without weights that is bound to tensors of the arena."""
