"""Where a camera's frames come from: a file for each decoder, all behind one small interface."""
