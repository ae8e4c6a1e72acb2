"""The HTTP server: an OpenAI-compatible API over an AsyncLLMEngine. Imports no jax."""
