"""Independent pieces of a merge: done one after the other, or beside each other on the machines of a Ray cluster."""
