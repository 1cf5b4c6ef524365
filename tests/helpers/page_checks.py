"""What must hold of every HTML page that hf_ext writes, found by reading it as a browser would, without one."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADS = ("src", "srcset", "poster", "data", "background", "action", "formaction", "xlink:href")


class Page(HTMLParser):
    """Elements, ids, links and text of a page; `problems` says what is wrong with it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        self.problems += [f"<{tag}> stays open" for tag in self._open]
        self.problems += [f"id {name} twice" for name in {name for name in self.ids if self.ids.count(name) > 1}]
        self.problems += [f"link {link} leads nowhere" for link in self.links if link[1:] not in self.ids]
        self.problems += [f"style loads {url}" for url in re.findall(r"url\((?!#)([^)]*)\)|@import", html)]
        used = re.findall(r"url\(#([^)]*)\)|xlink:href=\"#([^\"]*)\"", html)
        self.problems += [f"#{one}{other} is used and not drawn" for one, other in used if one + other not in self.ids]

    @property
    def text(self) -> str:
        """All that a reader sees, on one line."""
        return " ".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.problems.append(f"</{tag}> at line {self.getpos()[0]} closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self._open:
            self.texts.append(" ".join(data.split()))

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "iframe", "object", "embed", "base", "form"):
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name == "xlink:href" and (value or "").startswith("#"):
                continue  # a mark that is drawn many times
            elif name in LOADS or (name == "href" and value != "data:,"):
                self.problems.append(f"<{tag} {name}={value}> loads")
            elif name.startswith("on"):
                self.problems.append(f"<{tag} {name}> runs code")


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colours like #1b2026, 1 to 21."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def palettes(html: str) -> dict[str, dict[str, str]]:
    """Colours by variable, for light, dark and print, each with what it does not set itself from light."""
    blocks = re.findall(r"(@media[^{]*\{\s*)?:root\s*\{([^}]*)\}", html)
    found = {}
    for media, block in blocks:
        name = "dark" if "dark" in media else ("print" if "print" in media else "light")
        found[name] = {**found.get("light", {}), **dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))}
    return found
