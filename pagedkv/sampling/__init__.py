"""Sampling parameters, the sampler, and the incremental detokenizer."""
