"""What users start: the LLM class, the HTTP server."""
