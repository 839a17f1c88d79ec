"""What moves: vehicles, cyclists and people, their shapes and their ways."""
