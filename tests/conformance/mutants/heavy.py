"""A module that names a descriptor and loads a framework, which is the only fault."""

import torch  # noqa: F401

from tests.conformance.mutants.plugins import (
    mutant_descriptor_imports_a_framework,  # type: ignore[attr-defined]  # noqa: F401
)
