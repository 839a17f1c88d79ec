"""One file per method; importing this package fills the registry METHODS."""

from merger.methods import baselines, mainstream, orders, paper, top_down

__all__ = ["baselines", "mainstream", "orders", "paper", "top_down"]
