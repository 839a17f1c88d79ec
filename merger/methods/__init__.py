"""One file for each method; importing this package fills the registry."""

from merger.methods import baselines, gemel, mainstream, substitute, top_down, trunk

__all__ = ["baselines", "gemel", "mainstream", "substitute", "top_down", "trunk"]
