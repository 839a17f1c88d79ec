"""What a model costs, and how good its answers are."""
