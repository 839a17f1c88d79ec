"""Movers: how bytes of a bundle reach the device, one file per kind of memory."""
