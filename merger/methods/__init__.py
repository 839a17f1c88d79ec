"""One file per method; importing this package fills the registry METHODS."""

from merger.methods import baselines, gemel

__all__ = ["baselines", "gemel"]
