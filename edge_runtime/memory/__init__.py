"""Device memory: what is resident where, and how bytes get there."""
