"""A folder per claim; `python -m benchmarks.FOLDER.SCRIPT` measures it."""
