"""What a model can be made of besides its own layers: residuals, factors, weights in fewer bits, measured norms."""
