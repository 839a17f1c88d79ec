"""Whether the bytes of the bundle that a box serves are still those that were hashed when it was opened."""
