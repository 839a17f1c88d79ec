"""The frames a query is trained and judged on, from the disk to what a network is fed."""
