"""Architectures that answer what a frame shows."""
