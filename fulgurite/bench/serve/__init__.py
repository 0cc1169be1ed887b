"""Suite `serve`: a load generator for OpenAI-compatible servers, and the comparisons made with it."""
