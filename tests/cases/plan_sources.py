"""Where a search takes its timelines from, for tests: made by hand, and each of them ready."""

from __future__ import annotations

from vram_guard.plan.search_space import Option
from vram_guard.timeline import Timeline


class ReadySource:
    """A subclass has a timeline for every option when it is called; nothing is composed."""

    def __call__(self, option: Option) -> Timeline:
        raise NotImplementedError

    def exact(self, option: Option, size: int) -> Timeline:
        return self(option)

    direct = exact

    def least(self, option: Option, size: int) -> int:
        return 0

    def composed(self, option: Option, size: int) -> bool:
        return False

    def treats_equal_blocks(self, option: Option) -> bool:
        return False

    def known(self, option: Option, size: int) -> bool:
        return True

    def begin(self, option: Option, size: int) -> None:
        """Nothing is made ahead."""

    def end(self) -> None:
        """Nothing was begun."""

    def distrust(self, option: Option) -> None:
        raise AssertionError
