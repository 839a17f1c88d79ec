"""Files of others, read within bounds and without running code; files of our own, written whole."""
