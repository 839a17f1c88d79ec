"""Files that people and programs write: read against a schema, written whole or not at all."""
