"""Model files, tokenizers and the native decoder."""
