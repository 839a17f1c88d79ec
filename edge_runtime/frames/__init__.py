"""Frames between cameras and queries, the answers to them, samples and drawings of both."""
