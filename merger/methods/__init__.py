"""One file for each method; importing this package fills the registry."""

from gemel.merger.methods import baselines, gemel, top_down

__all__ = ["baselines", "gemel", "top_down"]
