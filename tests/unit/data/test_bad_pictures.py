"""150 pictures and rows that are broken, odd or hostile: each is read, or named in a sentence and counted."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_world import draw, make_picture_model
from PIL import Image

from flatout.cli.main import main
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.errors import DataError

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
GOOD, EITHER = "is read", "is read or named"
# a row with pictures, and what becomes of it: GOOD, EITHER, or a part of the sentence that names it
Case = tuple[dict[str, Any], str]


def ask(*pictures: Any, text: str = "what is shown?") -> dict[str, Any]:
    parts = [*({"type": "image", **one} for one in pictures), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a red square"}]}


def of(content: bytes) -> dict[str, Any]:
    return ask({"base64": base64.b64encode(content).decode()})


def marked(text: str, images: Any, answer: str = "a red square") -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images}


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 20)) -> Image.Image:
    return Image.open(io.BytesIO(draw(size[1], size[0], 5))).convert(mode)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))
             for name, held in chunks]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def box(content: bytes) -> bytes:
    """The first box of a file in the format of MP4."""
    return struct.pack(">I", 4 + len(content)) + content + bytes(8)


def header(width: int, height: int, depth: int = 8, color: int = 2) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)


def damaged() -> Iterator[tuple[str, Case]]:
    """Files of every kind, cut off and overwritten."""
    for kind in KINDS:
        whole = saved(picture(), kind)
        yield f"{kind} whole", (of(whole), GOOD)
        for share in (0.02, 0.3, 0.6, 0.95):
            yield f"{kind} cut at {share}", (of(whole[: int(share * len(whole))]), EITHER)
        for seed in range(4):
            random = np.random.default_rng(seed)
            held = bytearray(whole)
            for place in random.integers(0, len(held), 12).tolist():
                held[place] = int(random.integers(0, 256))
            yield f"{kind} overwritten {seed}", (of(bytes(held)), EITHER)


def odd() -> Iterator[tuple[str, Case]]:
    """Whole files that are unusual: their modes, sizes, frames, orientation and formats."""
    for mode in ("1", "L", "LA", "P", "RGBA"):
        yield f"mode {mode}", (of(saved(picture(mode), "PNG")), GOOD)
    for mode in ("CMYK", "YCbCr"):
        yield f"mode {mode}", (of(saved(picture(mode), "JPEG")), GOOD)
    for mode in ("I;16", "I", "F", "LAB"):
        content = saved(Image.new(mode, (20, 20)), "TIFF")
        yield f"mode {mode}", (of(content), f"its pixels are of mode {mode}")
    rows = zlib.compress(b"".join(b"\0" + bytes(range(6 * 20)) for _ in range(20)))
    deep = png(header(20, 20, depth=16), (b"IDAT", rows), (b"IEND", b""))
    assert Image.open(io.BytesIO(deep)).getpixel((1, 0)) == (6, 8, 10)  # the high byte of each
    yield "RGB of 16 bit", (of(deep), GOOD)
    yield "gray of 16 bit", (of(saved(Image.new("I;16", (20, 20)), "PNG")), "its pixels are of mode I;16")
    for name, options in {"progressive": {"progressive": True}, "no chroma": {"subsampling": 2}}.items():
        yield f"JPEG {name}", (of(saved(picture(), "JPEG", **options)), GOOD)
    yield "PNG transparent color", (of(saved(picture("P"), "PNG", transparency=0)), GOOD)
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        others = [Image.new("RGB", (24, 20), "red"), Image.new("RGB", (24, 20), "blue")]
        content = saved(picture(), kind, save_all=True, append_images=others)
        yield f"{kind} animated", (of(content), "animated, with 3 frames")
    # a phone's picture with a second one behind it
    yield "MPO", (of(saved(picture(), "MPO", save_all=True, append_images=[picture()])), GOOD)
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"orientation {orientation}", (of(saved(picture(), "JPEG", exif=exif.tobytes())), GOOD)
    yield "EXIF that is none", (of(saved(picture(), "JPEG", exif=b"Exif\0\0" + bytes(range(99)))), EITHER)
    for width, height in ((1, 1), (3, 3), (3, 400), (400, 3)):
        yield f"{width} x {height}", (of(saved(picture(size=(width, height)), "PNG")), "pixels are too few")
    yield "a strip", (of(saved(picture(size=(900, 4)), "PNG")), "the image processor refuses 4 x 900 pixels")
    for kind in ("ICO", "PPM", "TGA", "JPEG2000"):
        yield f"format {kind}", (of(saved(picture(size=(32, 32)), kind)), EITHER)


def hostile() -> Iterator[tuple[str, Case]]:
    """Files that ask for much memory, or to be run."""
    rows = zlib.compress(bytes(1000))
    for width, height in ((30000, 30000), (65535, 65535), (2**31 - 1, 2**31 - 1), (2**26, 4)):
        yield f"PNG of {width} x {height}", (of(png(header(width, height), (b"IDAT", rows), (b"IEND", b""))), "pixels")
    yield "PNG of no pixels", (of(png(header(0, 0), (b"IDAT", rows), (b"IEND", b""))), "its file is")
    bomb = zlib.compress(bytes(200 << 20), 9)
    for name, held in {
        "zTXt": b"Comment\0\0" + bomb, "iTXt": b"Comment\0\1\0\0\0" + bomb, "iCCP": b"profile\0\0" + bomb,
    }.items():  # fmt: skip
        content = png(header(8, 8), (name.encode(), held), (b"IDAT", zlib.compress(bytes(8 * 25))), (b"IEND", b""))
        yield f"PNG with a bomb in {name}", (of(content), EITHER)
    content = png(header(8, 8), (b"IDAT", bomb), (b"IEND", b""))
    yield "PNG with a bomb of pixels", (of(content), EITHER)
    jpeg = saved(picture(), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    yield "JPEG of 65500 x 65500", (of(jpeg[:at] + struct.pack(">HH", 65500, 65500) + jpeg[at + 4 :]), "pixels")
    for number, (width, height) in enumerate(((20000, 20000), (12000, 7000))):
        content = jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]
        yield f"JPEG bomb {number}", (of(content), "far more than 67,108,864 pixels" if not number else "are too many")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 20\n%%EndComments\nshowpage\n%%EOF\n"
    unknown = "of an unknown type, or damaged"
    others = {
        "EPS": (eps, "a PostScript drawing"), "SVG": (b"<?xml version='1.0'?>\n<svg xmlns='a'/>", "an SVG drawing"),
        "PDF": (b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n", "a PDF document"),
        "HTML": (b"\n <!DOCTYPE html><html><body><svg/></body></html>", "a web page"),
        "ZIP": (b"PK\3\4" + bytes(40), "a ZIP archive"), "JSON": (b'{"error": "not found"}', "text"),
        "NumPy": (b"\x93NUMPY\1\0" + bytes(80), unknown), "zeros": (bytes(500), unknown), "one byte": (b"x", unknown),
        "text": ("kein Bild, \u00fcberhaupt".encode(), "text"), "HEIC": (box(b"ftypheic"), "a HEIC picture"),
        "AVIF": (box(b"ftypavif"), "an AVIF picture"), "MP4": (box(b"ftypisom"), "a video"),
        "Matroska": (b"\x1aE\xdf\xa3" + bytes(40), "a video"), "AVI": (b"RIFF\0\0\0\0AVI LIST", "a video"),
        "JPEG XL": (box(b"JXL \r\n\x87\n"), "a JPEG XL picture"), "JPEG 2000": (box(b"jP  \r\n\x87\n"), "a JPEG 2000"),
        "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        "an icon": (saved(picture(size=(32, 32)), "ICO"), unknown),
    }  # fmt: skip
    for name, (held, kind) in others.items():
        yield f"a file of {name}", (of(held), f"its file is {kind}")


def elsewhere(folder: Path) -> Iterator[tuple[str, Case]]:
    """Places that are none, or no place of a file."""
    (folder / "empty.png").write_bytes(b"")
    (folder / "link.png").symlink_to(folder / "nothing.png")
    os.mkfifo(folder / "pipe.png")
    places = {
        "missing": "nothing.png", "in no folder": "no/such/folder/a.png", "a folder": ".", "NUL": "a\0.png",
        "too long": "a_" * 2500, "a broken link": "link.png", "a home": "~nobody-there/a.png", "a device": "/dev/zero",
        "a pipe": "pipe.png", "half a surrogate": "a\ud800.png",
    }  # fmt: skip
    for name, path in places.items():
        yield f"at {name}", (ask({"path": path}), "cannot be read")
    yield "an empty file", (ask({"path": "empty.png"}), "its file is empty; expected a picture in one of PNG")
    for scheme in ("http", "HTTPS", "s3", "gs", "ftp", "file"):
        yield f"at {scheme}", (ask({"url": f"{scheme}://a.example/b.png"}), "download it first")
    yield "at a file's URI", (ask({"url": (folder / "good.png").as_uri()}), GOOD)
    yield "at a missing file's URI", (ask({"url": "file:///no/such/a.png"}), "cannot be read: No such file")
    for name, held in {"letters": "%%%", "padding": "QUJ", "its alphabet": "_-_-", "its end": "QU=D"}.items():
        yield f"base64 with bad {name}", (ask({"base64": held}), "its base64 is damaged")
    good = base64.encodebytes((folder / "good.png").read_bytes()).decode()
    yield "base64 in lines", (ask({"base64": good}), GOOD)
    yield "base64 as a path", (ask({"image": good}), "looks like base64, not like a path")
    yield "base64 among paths", (marked("<image>?", [good.replace("\n", "")]), "looks like base64, not like a path")
    yield "an id of OpenAI", (ask({"file_id": "file-1"}), ".file_id names a file at a service")
    yield (
        "an id of Anthropic",
        (ask({"source": {"type": "file", "file_id": "1"}}), ".file_id names a file at a service"),
    )
    outside = folder / "outside"
    outside.mkdir()
    (outside / "up.png").symlink_to(folder / "good.png")
    for name, path in {"up": "outside/../good.png", "a link": "outside/up.png"}.items():
        yield f"at {name}", (ask({"path": path}), GOOD)
    junk = saved(picture(), "JPEG")
    yield "JPEG with junk behind it", (of(junk + b"junk" * 99), GOOD)
    yield "JPEG without its end", (of(junk[:-2]), "its file is damaged or cut off")
    for mime in ("", "image/gif", "image/jpeg;charset=utf-8"):
        uri = f"data:{mime};base64,{base64.b64encode(junk).decode()}"
        yield f"a URI of {mime!r}", (ask({"url": uri}), GOOD)
    yield "one picture twice", (marked("<image><image>?", ["good.png", "good.png"]), GOOD)
    yield "null among them", (marked("<image><image>?", ["good.png", None]), "images[1] is null, not a picture")
    yield "lists in a list", (marked("<image><image>?", [["good.png"], ["good.png"]]), "images[0] is a list")
    yield "a URI without base64", (ask({"url": "data:image/png,abc"}), "of data URIs, only data:image/png;base64,")
    yield "a URI of a text", (ask({"url": "data:text/plain;base64,QUJD"}), "its file is of an unknown type")


def wrong() -> Iterator[tuple[str, Case]]:
    """Rows whose pictures are of a wrong type, or not as many as their places."""
    held: dict[str, Any] = {
        "a number": 5, "true": True, "an object": {}, "a list": [], "null": None, "a name": {"name": "a.png"},
        "a path of a number": {"path": 5}, "a nested list": ["good.png"],
    }  # fmt: skip
    for name, value in held.items():
        says = "images[0]" if value or name == "a name" else "images has 0 pictures, but the turns have 1 <image>"
        yield f"images with {name}", (marked("<image>?", [value]), says)
    yield (
        "images with an empty path",
        (marked("<image>?", [" "]), "images has 0 pictures, but the turns have 1 <image>"),
    )
    for name, value in {"a number": 5, "an object": {"a": "b"}}.items():
        yield f"images that are {name}", (marked("<image>?", value), "images[0]")
    one, two = "images has 1 pictures, but the turns have", "images has 2 pictures, but the turns have"
    yield "a mark too many", (marked("<image><image>?", ["good.png"]), one)
    yield "a picture too many", (marked("<image>?", ["good.png"] * 2), two)
    yield "marks without pictures", (marked("<image>?", []), "images has 0 pictures, but the turns have 1 <image>")
    yield "marks without a column", ({"messages": marked("<image>?", [])["messages"]}, GOOD)
    yield "marks and null", (marked("<image>?", None), "images has 0 pictures, but the turns have 1 <image>")
    yield "a mark in the answer", (marked("?", ["good.png"], "<image>"), "an assistant turn holds <image>")
    yield "pictures without marks", (marked("what is shown?", ["good.png"] * 2), GOOD)
    yield "no pictures and no marks", (marked("what is shown?", []), GOOD)
    both = {**ask({}, text="<image>?"), "images": ["good.png"]}
    yield "parts and marks", (both, "both picture parts and <image>")
    yield "parts without pictures", (ask({}), "images has 0 pictures, but the turns have 1 picture parts")
    yield "the model's own mark", (ask({"path": "good.png"}, text="<|image_pad|>"), "the placeholder of an image")
    yield "a picture of one size of its own", (ask({"path": "good.png", "min_pixels": 9}), "sizes one picture")
    yield "two columns", ({**marked("<image>?", ["good.png"]), "image": "good.png"}, "both hold pictures")
    yield "a picture in the answer", ({"messages": [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "image", "path": "good.png"}]},
    ]}, "a model that is trained here writes none")  # fmt: skip
    for kind in ("video", "audio"):
        row = {"messages": [{"role": "user", "content": [{"type": kind, kind: "a"}]}, *ask()["messages"][1:]]}
        yield f"a {kind}", (row, "cannot be trained on yet")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad_pictures")
    (root / "good.png").write_bytes(draw(20, 24, 1))
    make_picture_model(root / "model", "qwen2_5_vl")
    return root


@pytest.fixture(scope="module")
def cases(world):
    return {name: case for part in (damaged(), odd(), hostile(), elsewhere(world), wrong()) for name, case in part}


def build(world: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> Any:
    path = world / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"name": name, "root": world / "data", "sources": [{"path": str(path)}], "num_procs": 1}
    return open_or_build(DataConfig(**values | settings), str(world / "model"))


def test_bad_pictures_are_counted_and_the_rest_is_trained(world, cases, capfd):
    assert len(cases) >= 150
    store = build(world, "all", [row for row, _ in cases.values()], on_bad_row="skip")
    kept = {int(number) - 1 for number in store.rows}
    fates = {name: index in kept for index, name in enumerate(cases)}
    assert [name for name, (_, fate) in cases.items() if fate == GOOD and not fates[name]] == []
    assert [name for name, (_, fate) in cases.items() if fate not in (GOOD, EITHER) and fates[name]] == []
    assert store.meta.counts["bad"] == len(cases) - len(kept)
    config = world / "run.yaml"
    config.write_text(
        f"run_dir: {world / 'run'}\ndevice: cpu\nmodel: {{name: '{world / 'model'}', precision: fp32}}\n"
        f"data: {{name: all, root: '{world / 'data'}', on_bad_row: skip, "
        f"sources: [{{path: '{world / 'all.jsonl'}'}}]}}\n"
        "lora: {rank: 4, alpha: 8}\nbatch: {samples_per_step: 16, epochs: 1}\neval: {prompts: []}\n"
    )
    assert main(["train", str(config)]) == 0
    assert "complete" in capfd.readouterr().out


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.exhaustive), 9])
def test_each_alone_is_read_or_named_in_a_sentence(world, cases, step):
    wrong = []
    for number, (name, (row, fate)) in enumerate([*cases.items()][::step]):
        try:
            build(world, f"one-{number}", [row], special_tokens="text")  # alone, it is all rows
            said = GOOD
        except DataError as error:
            said = str(error)
        is_named = re.fullmatch(rf".*\n  - [^\n]*one-{number}\.jsonl:1: [^\n]{{10,}}", said) and " at 0x" not in said
        if not (said == GOOD or is_named) or (fate != EITHER and fate not in said):
            wrong.append((name, said))
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong)
