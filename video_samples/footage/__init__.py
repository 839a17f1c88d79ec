"""From frames to clips with truth, and the questions asked of them."""
