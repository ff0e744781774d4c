"""What a deliberate break is, and how it is made in a copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A break.

    Attributes:
        says: the property that is gone.
        file: that is changed, below the repository.
        old: text that stands there once.
        new: what stands there instead.
        tests: arguments of pytest that must fail with the break and pass without.
    """

    says: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder that it is made in."""
        return str(Path(self.file).parent)

    def broken(self, source: str) -> str:
        """The text of the file with the break.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.file}: '{self.says}': got {count} places of {self.old!r}, want one; write the break anew"
            )
        return source.replace(self.old, self.new)
