"""The command line, demo, evaluation and reports of Gemel."""
