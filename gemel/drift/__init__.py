"""Whether a box still answers as its originals would: their answers beside its own, on the frames that it kept."""
