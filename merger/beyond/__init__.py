"""Past the ceiling: layers stored once within a model, or as factors of low rank."""
