"""One file per method; importing this package fills the registry METHODS."""

from merger.methods import baselines, gemel, mainstream, orders, wide

__all__ = ["baselines", "gemel", "mainstream", "orders", "wide"]
