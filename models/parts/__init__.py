"""What a model can be made of besides its own layers: residuals, factors, narrow weights, measured norms."""
