"""Reference implementations of the well-known ops, and how a backend replaces them."""
