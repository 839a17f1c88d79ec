"""Models that clients send to a running box, and the port by which they ask them."""
