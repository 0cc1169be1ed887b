"""The engine: requests in, tokens out. schedule → run → sample, one step at a time."""
