"""Suite `fusions`: generated kernels against eager, torch.compile and the copy bandwidth."""
