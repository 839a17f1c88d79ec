"""Training: one loop for originals and merged models, what it is fed, and in which precision."""
