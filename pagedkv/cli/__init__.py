"""The `pagedkv` command."""
