"""What helps one query alone while the shared weights stand still, so that no other need be judged again."""
