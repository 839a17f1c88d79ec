"""Objects in frames: boxes, masks, outlines, candidates."""
