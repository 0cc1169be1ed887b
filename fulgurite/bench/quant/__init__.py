"""Suite `quant`: GEMMs and casts of quantized formats."""
