"""The feed-forward tail around vectorised GDPA. The norms alone are already vectorised in reference.py."""

from __future__ import annotations

from ..gdpa import eager as gdpa_eager
from ..registry import Implementation
from .reference import _unsupported, pffn_with

pffn_forward, pffn_backward = pffn_with(gdpa_eager.forward, gdpa_eager.backward)

IMPLEMENTATIONS = {"pffn": Implementation("eager", pffn_forward, pffn_backward, _unsupported)}
