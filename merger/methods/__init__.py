"""One file per method; importing this package fills the registry METHODS."""

from merger.methods import baselines, mainstream, orders, wide
from merger.methods import paper as gemel

__all__ = ["baselines", "gemel", "mainstream", "orders", "wide"]
