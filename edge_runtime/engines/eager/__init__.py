"""The engine `torch`: eager modules bound to the arena."""
