"""Renders camera clips with ground truth, and the sample workload made from them."""
