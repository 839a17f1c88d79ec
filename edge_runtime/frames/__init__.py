"""Frames from the camera to the result: sources, mailboxes, the ledger that counts them, records."""
