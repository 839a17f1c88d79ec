"""One file for each method; importing this package fills the registry."""

from merger.methods import baselines, gemel, mainstream, top_down

__all__ = ["baselines", "gemel", "mainstream", "top_down"]
