"""The spool: frames that a box kept with the answers it gave, for a drift check, and what the last one found."""
