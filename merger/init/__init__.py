"""FOLD: say what is in here."""
