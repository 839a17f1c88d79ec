"""The scenes: what stands where, and what moves through it."""
