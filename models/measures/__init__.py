"""How good answers are, how alike, and how surely."""
