"""What to expect on a box before anything is shipped."""
