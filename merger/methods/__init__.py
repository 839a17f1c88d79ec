"""One file for each method, beside the stages that they share."""
