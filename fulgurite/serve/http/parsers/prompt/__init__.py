"""The prompt side of tools: a request's messages and tools in, what a chat template expects out."""
