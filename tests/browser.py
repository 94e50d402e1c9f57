"""A page in headless Chromium: its picture, what the browser complains about, and what scripts find in it."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def find() -> str | None:
    """Return the browser's path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Visit:
    """A page as it was shown: the picture, complaints on the console, and the document after it was read."""

    picture: Path
    complaints: list[str]
    document: str


def visit(page: Path, folder: Path, *, width: int = 1200, height: int = 900) -> Visit:
    """Open a page that is a file."""
    picture = folder / f"{page.stem}.png"
    words = [
        str(find()), "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'user'}",
        f"--window-size={width},{height}", f"--screenshot={picture}", "--dump-dom", "--enable-logging=stderr",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return Visit(picture, [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stdout)


def ask(page: Path, folder: Path, question: str, *, width: int = 1200) -> Any:
    """Return the JSON value of a JavaScript expression in a copy of the page whose policy lets scripts run."""
    text, count = _POLICY.subn("", page.read_text("utf-8"))
    assert count == 1, "the page has no policy"
    script = (
        "<script>const out = document.createElement('pre'); out.id = 'answer';"
        f"out.textContent = JSON.stringify({question}); document.body.append(out);</script>"
    )
    copy = folder / f"asked-{page.name}"
    copy.write_text(text.replace("</body>", f"{script}</body>"), "utf-8")
    found = visit(copy, folder, width=width)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', found.document, re.DOTALL)
    assert answer, found.complaints
    return json.loads(html.unescape(answer.group(1)))
