"""The server: OpenAI's API over one engine, and a page to watch it."""
