"""Labels and labelled pictures as other programs write them."""
