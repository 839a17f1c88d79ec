"""One file per method; importing this package fills the registry METHODS."""

from merger.methods import baselines, mainstream, orders, paper, wide

__all__ = ["baselines", "mainstream", "orders", "paper", "wide"]
