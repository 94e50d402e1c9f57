"""Pages, charts, and files that are whole or not there."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from specrt import RequestError
from specrt.output import check_folder, check_output, make_folder, write_output
from specrt.page import mixed, page, shown
from specrt.svg import Series, bars, lines, stacked, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_page_needs_nothing_else_and_lets_no_script_run() -> None:
    text = page("a <title>", "<p>body</p>", style="p { color: red; }")
    assert "<title>a &lt;title&gt;</title>" in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link"):
        assert word not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<b>&\"'", "a&lt;b&gt;&amp;&quot;&#x27;"),
        ("a\nb\tc", "a\u23ce\nb\u21e5\tc"),
        ("\x00\x1b\r\x7f", "\u2400\u241b\u240d\u2421"),
        ("\x85\u202e\u2066", "\u2039U+0085\u203a\u2039U+202E\u203a\u2039U+2066\u203a"),
        ("é 你好 \U0001f642 \u200d", "é 你好 \U0001f642 \u200d"),
    ],
)
def test_everything_in_a_text_is_seen(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_output(path, "old", what="page")
    write_output(path, "nöw", what="page")
    assert path.read_bytes() == "nöw".encode()
    with pytest.raises(UnicodeEncodeError):
        write_output(path, "half \ud800", what="page")

    def full(self: Path, *_: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RequestError, match=r"page: .*page.html cannot be written: No space left on device"):
        write_output(path, "new", what="page")
    assert path.read_bytes() == "nöw".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    check_output(file, what="page")
    check_output(tmp_path / "new", what="page")
    check_folder(tmp_path, what="report")
    check_folder(tmp_path / "new", what="report")
    for bad in (tmp_path, Path("/dev/null")):
        with pytest.raises(RequestError, match="cannot be written: name another file"):
            check_output(bad, what="page")
    with pytest.raises(RequestError, match=r"report: expected a folder at .*file, found a file"):
        check_folder(file, what="report")
    with pytest.raises(RequestError, match=r"report: expected a folder at .*no, found none: make it first"):
        check_folder(tmp_path / "no" / "new", what="report")
    with pytest.raises(RequestError, match=r"report: .* cannot be made: "):
        make_folder(file / "new", what="report")


def chart(text: str) -> ET.Element:
    return ET.fromstring(text)


def heights(picture: ET.Element, colour: str) -> list[float]:
    return [float(rect.get("height", "")) for rect in picture.iter(f"{SVG}rect") if rect.get("fill") == colour]


SERIES = (Series("one <1>", "#111111", (1.0, 4.0)), Series("two", "#222222", (2.0, None)))


def test_bars_are_as_high_as_their_values_and_say_them() -> None:
    picture = chart(bars(["a&b", "c"], SERIES, unit="tokens/s", width=400))
    one, four = heights(picture, "#111111")
    (two,) = heights(picture, "#222222")
    assert (two / one, four / one) == (pytest.approx(2, rel=0.01), pytest.approx(4, rel=0.01))
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles == ["a&b, one <1>: 1 tokens/s", "a&b, two: 2 tokens/s", "c, one <1>: 4 tokens/s"]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"tokens/s", "a&b", "c", "0", "1", "4"} <= set(texts)


def test_stacked_bars_begin_where_the_one_below_ends() -> None:
    picture = chart(stacked(["a", "b"], SERIES, unit="ms", width=400))
    below, above = (next(r for r in picture.iter(f"{SVG}rect") if r.get("fill") == s.colour) for s in SERIES)
    end = float(above.get("y", "")) + float(above.get("height", ""))
    assert end == pytest.approx(float(below.get("y", "")), abs=0.11)
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles[0] == "a: one <1> 1 ms, two 2 ms"


def test_a_line_ends_with_its_values() -> None:
    picture = chart(lines(["1", "2"], SERIES, unit="%", width=400))
    paths = [line.get("points", "").split() for line in picture.iter(f"{SVG}polyline")]
    assert list(map(len, paths)) == [2, 1]
    assert len(list(picture.iter(f"{SVG}circle"))) == 3


@pytest.mark.parametrize("draw", [bars, stacked, lines])
def test_a_chart_of_nothing_is_a_chart(draw: object) -> None:
    for labels, series in (((), ()), (("a",), (Series("s", "#111111", (0.0,)),)), (("a",), ())):
        chart(draw(labels, series, unit="s", width=300))  # type: ignore[operator]


def test_labels_that_have_no_room_are_slanted_or_left_out() -> None:
    few = chart(stacked(["a long label"] * 12, [], unit="s", width=400))
    many = chart(stacked([str(n) for n in range(500)], [], unit="s", width=400))
    assert sum("rotate" in (text.get("transform") or "") for text in few.iter(f"{SVG}text")) == 12
    assert 3 < len(list(many.iter(f"{SVG}text"))) < 30


@pytest.mark.parametrize(
    ("top", "expected"),
    [(5, [0, 1, 2, 3, 4, 5]), (0.3, [0, 0.1, 0.2, 0.3]), (7, [0, 2, 4, 6]), (23000, [0, 5000, 10000, 15000, 20000])],
)
def test_ticks_are_few_and_round(top: float, expected: list[float]) -> None:
    assert ticks(top) == pytest.approx(expected)


def test_white_makes_a_colour_paler() -> None:
    assert (mixed("#102030", 0.0), mixed("#102030", 1.0), mixed("#000000", 0.5)) == ("#102030", "#ffffff", "#808080")
