"""Files of models as people have them, read by Gemel."""
