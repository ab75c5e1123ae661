"""Finds, probes, chooses, loads and creates backend plugins: entry points of the group `pagedkv.backends`.

discovery   names, distributions and versions from package metadata; nothing is imported
probing     what each plugin sees, asked in child processes
selection   argument, `PAGEDKV_BACKEND`, automatic by (score, name); an explicit choice is that one or an error
loading     the chosen one into this process, checked
creation    options, the instance, its required methods
requirements  what distributions require of each other, by their metadata
checks      what a plugin hands over, field by field
"""

from pagedkv.environment import ENVIRONMENT, check_environment
from pagedkv.plugins.creation import check_options, create, make, parse_options, pool_cost
from pagedkv.plugins.discovery import GROUP, Found, discover, find
from pagedkv.plugins.loading import load, untouched
from pagedkv.plugins.probing import Status, probe_all
from pagedkv.plugins.selection import Identity, Selected, offer, preview, rank, requested, reselect, select

__all__ = [
    "ENVIRONMENT",
    "GROUP",
    "Found",
    "Identity",
    "Selected",
    "Status",
    "check_environment",
    "check_options",
    "create",
    "discover",
    "find",
    "load",
    "make",
    "offer",
    "parse_options",
    "pool_cost",
    "preview",
    "probe_all",
    "rank",
    "requested",
    "reselect",
    "select",
    "untouched",
]
