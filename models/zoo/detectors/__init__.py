"""Architectures that answer what stands where."""
