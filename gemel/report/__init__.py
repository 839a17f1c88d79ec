"""The report: one JSON document, one self-contained page."""
