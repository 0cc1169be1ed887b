"""The engine: requests in, tokens out. schedule → execute → postprocess, one step at a time."""
