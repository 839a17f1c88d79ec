"""What `gemel` can be told: a file per command or small family, its grammar beside what it does.

Each has `register(commands)`, and imports what is heavy where it does its work, so that `gemel --help` answers at once.
"""
