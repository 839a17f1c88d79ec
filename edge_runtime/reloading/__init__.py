"""A running box takes up another bundle or config: checked whole beside what serves, swapped between two frames."""
