"""What could be shared and what is: layers, groups, sharing plans."""
