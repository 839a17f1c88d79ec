"""Independent pieces of a merge, done one after the other or on the machines of a Ray cluster."""
