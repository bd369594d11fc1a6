"""HTTP endpoints with OpenAI's request and response types."""
