"""Offline: which layers to share, and the retraining that keeps accuracy."""
