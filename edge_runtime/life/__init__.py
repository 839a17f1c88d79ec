"""The life of a box: its config, how it starts, serves, reloads and ends."""
