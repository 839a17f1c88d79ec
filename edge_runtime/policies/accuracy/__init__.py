"""`adaptive` where accuracy over time is the objective."""
