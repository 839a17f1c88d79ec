"""Which queries of a fleet go on which box, by what their models need and could share."""
