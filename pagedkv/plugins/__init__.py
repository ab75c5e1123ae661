"""Finds, probes, chooses, loads and creates backend plugins: entry points of the group `pagedkv.backends`.

discovery   names, distributions and versions from package metadata; nothing is imported
probing     what each plugin sees, asked in child processes
selection   argument, `PAGEDKV_BACKEND`, automatic by (score, name); an explicit choice is that one or an error
loading     the chosen one into this process, checked
creation    options, the instance, its required methods
"""

from pagedkv.environment import ENVIRONMENT, check_environment
from pagedkv.plugins.creation import check_options, create, parse_options
from pagedkv.plugins.discovery import GROUP, Found, discover, find
from pagedkv.plugins.loading import load
from pagedkv.plugins.probing import Status, probe_all
from pagedkv.plugins.selection import Selected, preview, rank, requested, select

__all__ = [
    "ENVIRONMENT",
    "GROUP",
    "Found",
    "Selected",
    "Status",
    "check_environment",
    "check_options",
    "create",
    "discover",
    "find",
    "load",
    "parse_options",
    "preview",
    "probe_all",
    "rank",
    "requested",
    "select",
]
