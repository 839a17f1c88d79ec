"""In how many bits each weight of a merge is stored: as few as every query that uses it can bear."""
