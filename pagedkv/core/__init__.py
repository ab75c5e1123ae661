"""Ids only, no torch: block pool, block table, prefix index, requests, scheduler."""
