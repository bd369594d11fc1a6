"""The HTTP server: an OpenAI-compatible API over one engine, Prometheus metrics and a playground page."""
