"""Order of the GPU tests: they mostly wait for compilers, so `-n 12` needs the long ones first and small chunks."""

from __future__ import annotations

EARLY = ("compile", "opcheck", "first_call", "windows", "loads_and_descriptors", "backward_schemes", "bias")


def pytest_configure(config):
    # pytest-xdist hands out tests in chunks of many neighbours otherwise: those of one long test land on one worker.
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 1


def pytest_collection_modifyitems(items):
    def rank(item) -> int:
        return next((i for i, part in enumerate(EARLY) if part in item.name), len(EARLY))

    ours = [item for item in items if item.get_closest_marker("gpu")]
    if len(ours) == len(items):
        items.sort(key=rank)
