"""The same files, several ways: `make compare`."""
