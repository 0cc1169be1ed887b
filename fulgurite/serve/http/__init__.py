"""The HTTP server: OpenAI and Anthropic endpoints, the chat page, metrics."""
