"""Past the ceiling: layers stored once within a model, as factors, and in fewer bits."""
