"""What detectors are trained by."""
