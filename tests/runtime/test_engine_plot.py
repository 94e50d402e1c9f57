"""The plot of `specrt bench --engine`: a picture with its labels, refused before anything is measured."""

import re
from pathlib import Path
from typing import Any

import pytest

from specrt import MissingExtraError, RequestError, output
from specrt.engine_costs import CallCost, EngineFacts, EngineReport
from specrt.engine_plot import check_plot, write_plot


def call(engine: str, rows: int, context: int) -> CallCost:
    return CallCost(
        engine=engine, rows=rows, context=context, seconds=0.01 + 0.001 * rows, spread=0.1, num_bytes=10**8,
        gb_per_s=10.0, floor_s=0.002, over_floor=5.0, over_one=1.0, over_narrowest=1.0,
    )  # fmt: skip


REPORT = EngineReport(
    machine="a machine", engine_version="an engine", threads=2, repeats=3, context=256, verify_widths=(2, 6),
    read_bytes=1, gb_per_s=50.0,
    engines=tuple(
        EngineFacts(
            name=name, model="m", precision="fp32", weight_bytes=1, kv_bytes=1, prefill_tokens=1,
            prefill_tokens_per_s=1.0,
        )
        for name in ("target", "draft")
    ),
    calls=tuple(
        call(name, rows, context) for name in ("target", "draft") for context in (0, 256) for rows in (1, 2, 4, 6, 32)
        if rows not in (4, 32) or context == 256
    ),
    break_even=(),
)  # fmt: skip


def test_a_png_is_written(tmp_path: Path) -> None:
    write_plot(REPORT, tmp_path / "calls.png")
    content = (tmp_path / "calls.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert len(content) > 20_000


def test_an_svg_is_written_and_shows_every_line_with_its_label(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts as texts
        write_plot(REPORT, tmp_path / "calls.SVG")
    text = (tmp_path / "calls.SVG").read_text("utf-8")
    found = set(re.findall(r"<text [^>]*>([^<]*)</text>", text))
    assert found >= {
        "Against rows, at a context of 256 tokens", "rows of the call", "1", "2", "6", "32",
        "Against context length", "context (tokens in the KV buffers)", "time of the call (ms)",
    }  # fmt: skip
    for engine in ("target", "draft"):
        wanted = ("one call", "as many calls of 1 row", "reading at 50 GB/s", "1 row", "2 rows", "6 rows")
        assert found >= {f"{engine}, {label}" for label in wanted}
    assert "target, 32 rows" not in found, "a line needs more than one point"


@pytest.mark.parametrize("name", ["calls.pdf", "calls", "png", "calls.png.txt"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^plot: expected a file name that ends in .png or .svg, found '{name}'$"):
        check_plot(tmp_path / name)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "calls.png")
    check_plot(tmp_path / "calls.SVG")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RequestError, match=r"^plot: expected a folder at .*nowhere, found none: make it first"):
        check_plot(tmp_path / "nowhere" / "calls.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RequestError, match=r"folder\.png cannot be written: name another file"):
        check_plot(tmp_path / "folder.png")
    asked: list[Any] = []
    monkeypatch.setattr(output.os, "access", lambda path, _: asked.append(path))
    (tmp_path / "old.png").touch()
    for name in ("calls.png", "old.png"):
        with pytest.raises(RequestError, match="cannot be written: name another file"):
            check_plot(tmp_path / name)
    assert asked == [tmp_path, tmp_path / "old.png"]


def test_a_file_that_cannot_be_written_after_all_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"calls\.png cannot be written: No such file"):
        write_plot(REPORT, tmp_path / "gone" / "calls.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrt_profiles.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"^matplotlib not installed: run  pip install 'specrt\[bench\]'$"):
        check_plot(tmp_path / "calls.png")
