"""The bench on which methods work: the models, their frames, how they are judged, and what a merge may spend."""
