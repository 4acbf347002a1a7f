"""Training reads of a file what transformers' own processor makes of it; the independent side never converts it."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_families import SOME_FAMILIES
from picture_world import draw, make_picture_model, make_reader
from PIL import Image, ImageOps
from plain_pictures import plain_processor

from flatout.cli.main import main
from flatout.data.token_store import TokenStore

HEIGHT, WIDTH = 20, 30


def saved(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(tag: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = tag
    return exif.tobytes()


def of_16_bits(num_channels: int, color_type: int) -> bytes:
    """Return a PNG with 16 bits a channel, which Pillow does not write."""
    values = np.random.default_rng(7).integers(0, 1 << 16, (HEIGHT, WIDTH * num_channels)).astype(">u2")
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    parts = {b"IHDR": struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, color_type, 0, 0, 0), b"IDAT": zlib.compress(lines)}
    parts[b"IEND"] = b""
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def files() -> Iterator[tuple[str, bytes]]:
    """Yield names and files in every way to write transparency, color and orientation."""
    rgb, rgba, la = (
        Image.open(io.BytesIO(draw(HEIGHT, WIDTH, seed, mode=mode)))
        for seed, mode in enumerate(("RGB", "RGBA", "LA"), start=1)
    )
    drawing = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
    drawing.paste((20, 0, 0, 255), (5, 5, 20, 10))
    palette = rgb.convert("P")
    yield "drawing.png", saved(drawing, "PNG")
    yield "rgba.png", saved(rgba, "PNG")
    yield "opaque.png", saved(rgb.convert("RGBA"), "PNG")
    yield "la.png", saved(la, "PNG")
    yield "palette.png", saved(palette, "PNG")
    yield "palette-one.png", saved(palette, "PNG", transparency=palette.getpixel((3, 3)))
    yield "palette-many.png", saved(palette, "PNG", transparency=bytes(range(256)))
    yield "gray-one.png", saved(rgb.convert("L"), "PNG", transparency=rgb.convert("L").getpixel((3, 3)))
    yield "rgb-one.png", saved(rgb, "PNG", transparency=rgb.getpixel((3, 3)))
    yield "bits.png", saved(rgb.convert("1"), "PNG")
    yield "rgb16.png", of_16_bits(3, 2)
    yield "rgba16.png", of_16_bits(4, 6)
    yield "rgba.webp", saved(rgba, "WEBP", lossless=True, exact=True)
    yield "lossy.webp", saved(drawing, "WEBP")
    yield "transparent.gif", saved(palette, "GIF", transparency=palette.getpixel((3, 3)))
    for name, image in {"rgba": rgba, "la": la, "cmyk": rgb.convert("CMYK"), "ycbcr": rgb.convert("YCbCr")}.items():
        yield f"{name}.tiff", saved(image, "TIFF")
    for name, image in {"cmyk": rgb.convert("CMYK"), "gray": rgb.convert("L")}.items():
        yield f"{name}.jpeg", saved(image, "JPEG")
    yield "turned.jpeg", saved(rgb, "JPEG", exif=turned(6))
    yield "turned-rgba.png", saved(rgba, "PNG", exif=turned(8))
    yield "turned-palette.png", saved(palette, "PNG", transparency=bytes(range(256)), exif=turned(5))
    yield "turned-rgba.webp", saved(rgba, "WEBP", lossless=True, exif=turned(6))
    yield "turned-rgba.tiff", saved(rgba, "TIFF", tiffinfo={0x0112: 6})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("picture_files")
    lines = []
    for name, content in files():
        (folder / name).write_bytes(content)
        asked = {"role": "user", "content": f"<image>what is {name}?"}
        lines.append({"messages": [asked, {"role": "assistant", "content": "a red square"}], "images": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def built(rows: Path, model: Path, root: Path) -> Any:
    options = ("--name", "set", "--root", str(root), "--num-procs", "1")
    return main(["data", "build", str(rows), "--tokenizer", str(model), *options])


@pytest.mark.filterwarnings("error:.*Transparency")
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_training_reads_what_the_processor_makes_of_the_file(rows, tmp_path, family):
    from transformers import AutoModelForImageTextToText

    from flatout.trainer.picture_inputs import PictureMaker

    model = make_picture_model(tmp_path / family, family)
    assert built(rows, model, tmp_path) == 0
    store = TokenStore.open(tmp_path / "built_dataset" / "set")
    maker = PictureMaker.of(store, AutoModelForImageTextToText.from_pretrained(model))
    assert maker is not None
    plain, names = plain_processor(model), [json.loads(line)["images"][0] for line in rows.read_text().splitlines()]
    assert store.num_samples == len(names)
    for sample_id, row in enumerate(store.rows.tolist()):
        # of a path, Pillow maps a plain TIFF into memory and does not turn it
        image = Image.open(io.BytesIO(rows.with_name(names[row - 1]).read_bytes()))
        if "turned" in names[row - 1]:
            image = ImageOps.exif_transpose(image)
        expected, made = plain.image_processor(images=[image], return_tensors="np"), maker.begin(store, [sample_id])
        values = made.result()["pixel_values"]
        assert np.array_equal(values, expected["pixel_values"]), names[row - 1]
        own = slice(*store.picture_offsets[sample_id : sample_id + 2])
        sides = [int(store.extra[f"picture_{side}s"][own][0]) for side in ("height", "width")]
        assert sides == [image.height, image.width]
        assert int(store.extra["picture_values"][own][0]) == values.size
        text = plain(text=[plain.image_token], images=[image], return_tensors="np")
        num_tokens = int((text["input_ids"] == maker.token_id).sum())
        assert int(store.extra["picture_tokens"][own][0]) == num_tokens
    maker.close()


def test_what_a_processor_does_not_convert_is_refused_unless_it_is_opaque(tmp_path, capfd):
    make_reader(tmp_path / "model", "llava")
    settings = tmp_path / "model" / "processor_config.json"
    fields = json.loads(settings.read_text())
    fields["image_processor"]["do_convert_rgb"] = False
    settings.write_text(json.dumps(fields))
    contents = dict(files())
    rows = tmp_path / "rows.jsonl"

    def build(*names: str) -> Any:
        lines = [
            {"messages": [{"role": "user", "content": f"<image>{name}?"}, {"role": "assistant", "content": "red"}],
             "images": [f"data:;base64,{base64.b64encode(contents[name]).decode()}"]}
            for name in names
        ]  # fmt: skip
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return built(rows, tmp_path / "model", tmp_path / f"{len(names)}-{names[-1]}")

    assert build("opaque.png", "gray.jpeg", "cmyk.jpeg", "palette.png") == 0
    for name in ("rgba.png", "la.png", "palette-one.png", "turned-rgba.webp"):
        capfd.readouterr()
        assert build("gray.jpeg", name) == 3
        said = " ".join(capfd.readouterr().err.split())
        assert "rows.jsonl:2: images[0]: has transparent parts, which the image processor of" in said
        assert f"set do_convert_rgb: true in {settings.name}" in said
    fields["image_processor"]["do_convert_rgb"] = True
    settings.write_text(json.dumps(fields))
    assert build("rgba.png", "la.png", "palette-one.png", "turned-rgba.webp") == 0


def test_a_picture_in_memory_is_that_of_its_file(tmp_path):
    """From Python: Pillow's images and bytes, with transparency and orientation; arrays are named."""
    from flatout.api.inputs import prompts_in_memory
    from flatout.data.pictures.read import decoded
    from flatout.data.prompt_file import Prompt
    from flatout.errors import UsageError

    for name, content in files():
        (tmp_path / name).write_bytes(content)
        expected = decoded(content)
        for value in (Image.open(io.BytesIO(content)), content, tmp_path / name):
            prompt: Prompt
            (prompt,) = prompts_in_memory("what?", [value], None)
            given = decoded(prompt.pictures[0])
            assert (given.size, given.mode == "RGB") == (expected.size, expected.mode == "RGB"), name
            assert np.array_equal(given.convert("RGBA"), expected.convert("RGBA")), name
    with pytest.raises(UsageError, match="a value is a ndarray; give texts, and pictures as paths, bytes or Pillow"):
        prompts_in_memory("what?", [np.zeros((20, 30, 3), np.uint8)], None)
    with pytest.raises(UsageError, match="pixels of mode PA; convert it to RGBA"):
        prompts_in_memory("what?", [Image.new("PA", (20, 30))], None)


def test_small_copies_are_on_white(tmp_path):
    from flatout.data.pictures.show import thumbnails

    contents = dict(files())
    for name in ("drawing.png", "lossy.webp"):
        (copy,) = thumbnails([contents[name]])
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(copy.split(",")[1]))))
        assert pixels[-1, -1].min() > 240
        assert pixels[7, 12].max() < 60
