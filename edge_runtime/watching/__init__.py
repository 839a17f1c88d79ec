"""Watching a box from outside: HTTP in a thread of its own, metrics, and the dashboard; nothing here can slow it."""
