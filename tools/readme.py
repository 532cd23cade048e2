"""The README's table of what works, from ``docs/features.toml``: ``python -m tools.readme`` writes it, a test compares."""

from __future__ import annotations

import dataclasses
import re
import tomllib

from tools.layout import ROOT

__all__ = ["Feature", "features", "main", "rendered", "with_table"]

_BETWEEN = re.compile(r"(<!-- works: [^\n]*-->\n).*?(<!-- works end -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """A line of the table: ``tests`` are pytest node ids without parameters, ``limits`` what one would miss."""

    what: str
    tests: tuple[str, ...]
    limits: str = ""


def features() -> tuple[Feature, ...]:
    """The features in the order of the file."""
    read = tomllib.loads((ROOT / "docs" / "features.toml").read_text(encoding="utf-8"))
    return tuple(Feature(row["what"], tuple(row["tests"]), row.get("limits", "")) for row in read["feature"])


def rendered() -> str:
    """The table in Markdown."""
    lines = ["| What works | Limits | Kept true by |", "|---|---|---|"]
    for feature in features():
        links = ", ".join(f"[{test.split('::')[-1]}]({test.split('::')[0]})" for test in feature.tests)
        lines.append(f"| {feature.what} | {feature.limits} | {links} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """``text`` with the table between its two marks; ValueError if they are not there exactly once."""
    made, count = _BETWEEN.subn(lambda found: found[1] + rendered() + found[2], text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the table of what works instead of one")
    return made


def main() -> None:
    """Write the table into README.md."""
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
