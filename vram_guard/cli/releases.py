"""The releases that a prediction is for, compared with those that the training's own files ask for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vram_guard.cli.options import add_options
from vram_guard.cli.printing import tell

if TYPE_CHECKING:
    from vram_guard.releases.installed import Releases
    from vram_guard.releases.required import RequiredReleases


def add_release_options(parser: Any) -> None:
    """Add them to a parser or a group of one."""
    add_options(parser, "releases", default=None)


def required_releases(options: argparse.Namespace) -> RequiredReleases:
    """The releases that the named file asks for; read before any work.

    Raises:
        InvalidInputError: it cannot be read, is of another kind, or names a release that there cannot be.
    """
    from vram_guard.releases.required import RequiredReleases

    return RequiredReleases.read(options.releases)


def tell_differences(required: RequiredReleases, predicted: Releases | None) -> None:
    """Say apart from the answer where a prediction is not for the releases that are asked for."""
    for line in () if predicted is None else required.remarks(predicted):
        tell(line)
