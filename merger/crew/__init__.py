"""Several processes at one merge: who has which queries, what they tell each other, and the gradients they sum."""
