"""What helps one query alone, while the shared weights stand still."""
