"""Suite `train`: training steps of the same loop, eager, with torch.compile and with Fulgurite."""
