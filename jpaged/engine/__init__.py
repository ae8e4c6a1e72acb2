"""Wires scheduler, worker, tokenizer and detokeniser into LLMEngine and AsyncLLMEngine."""
