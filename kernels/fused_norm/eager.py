"""The feed-forward tail in torch around vectorised GDPA: reference.py is already vectorised, all but GDPA's loop."""

from __future__ import annotations

from ..registry import Implementation
from .reference import _unsupported, pffn_backward, pffn_forward

IMPLEMENTATIONS = {"pffn": Implementation("eager", pffn_forward, pffn_backward, _unsupported)}
