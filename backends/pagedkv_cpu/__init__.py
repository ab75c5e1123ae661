"""The CPU backend: torch, any block size, fp32, bf16 and fp16. Imports `pagedkv.api` and nothing else of pagedkv."""
