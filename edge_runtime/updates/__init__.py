"""Updates that a box pulls from a server, tries for a while, and takes back where it gets worse."""
