"""Modules under the names that articles use."""
