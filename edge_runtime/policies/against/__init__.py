"""What `adaptive` is measured against: the reference, chosen above the floor, and its shadow in thought."""
