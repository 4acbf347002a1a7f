"""Rows with pictures: every form of one, what stands for it, and files that are no good."""

from __future__ import annotations

import base64
import io
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_world import FAMILIES, draw, make_picture_model, make_reader
from PIL import Image
from row_cases import Row, cases, write_rows

from flatout.api.inputs import data_file
from flatout.config.schema import DataConfig
from flatout.data.build import open_or_build
from flatout.data.pictures.processor import PictureProcessor
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError, UsageError

PATH = "a.png"
CONTENT = draw(20, 30, 1)
OTHER = draw(33, 17, 2)
BASE64 = base64.b64encode(CONTENT).decode()
ANSWER = {"role": "assistant", "content": "a red square"}
ASKED = {"type": "text", "text": "what is shown?"}
MARKED = "<image>what is shown?"
Build = Callable[..., TokenStore]


@pytest.fixture(scope="session")
def readers(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("readers"), set[str]()

    def reader(family: str) -> Path:
        if family not in made:
            make_reader(root / family, family)
            made.add(family)
        return root / family

    return reader


@pytest.fixture
def build(readers, tmp_path):
    """Build rows beside the pictures a.png and b.png, with settings of `data`."""

    def build(rows: Any, family: str = "qwen2_5_vl", **settings: Any) -> TokenStore:
        (tmp_path / PATH).write_bytes(CONTENT)
        (tmp_path / "b.png").write_bytes(OTHER)
        path = tmp_path / "rows.jsonl"
        if isinstance(rows, str):
            path = Path(rows)
        else:
            write_rows(path, rows)
        values = {"name": "set", "root": tmp_path / "data", "sources": [{"path": str(path)}], "num_procs": 1}
        return open_or_build(DataConfig(**values | settings), str(readers(family)))

    return build


def row(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


# every form of a picture in a row; BASE64 stands for its content
FORMS: dict[str, Row] = {
    case["is"]: json.loads(json.dumps(case["row"]).replace("BASE64", BASE64)) for case in cases("pictures.jsonl")
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_picture_is_the_same_sample(build, readers, form):
    store = build([FORMS[form]])
    assert store.pictures(0) == [CONTENT]
    assert load_tokenizer(str(readers("qwen2_5_vl"))).decode(store.sample(0).token_ids) == (
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 8 + "<|vision_end|>what is shown?<|im_end|>\n"
        "<|im_start|>assistant\na red square<|im_end|>\n"
    )
    assert store.extra["picture_tokens"].tolist() == [8]


def test_a_set_whose_pictures_have_changed_is_built_again(readers, tmp_path):
    picture, name = tmp_path / PATH, str(readers("qwen2_5_vl"))
    picture.write_bytes(CONTENT)
    (tmp_path / "b.png").write_bytes(OTHER)
    rows = [FORMS["image"], row({"type": "image", "path": "b.png"}, ASKED)]
    write_rows(tmp_path / "rows.jsonl", rows)
    config, told = DataConfig(sources=[{"path": str(tmp_path / "rows.jsonl")}], root=tmp_path / "data"), list[str]()

    def pictures(**options: Any) -> list[bytes]:
        return open_or_build(config, name, log=told.append, **options).pictures(0)

    assert pictures() == [CONTENT]
    # the same files are reused, also where their times are others, and are read once then
    for seconds in (None, 1_000_000_000):
        if seconds:
            os.utime(picture, (seconds, seconds))
        assert pictures() == [CONTENT]
        assert told[-1].endswith("settings; its picture files are unchanged")
    # another content of the same size, at the same second
    other = draw(20, 30, 3) + bytes(100)
    other, before = other[: len(CONTENT)] if len(other) > len(CONTENT) else other, picture.stat()
    assert len(other) == len(CONTENT)
    picture.write_bytes(other)
    os.utime(picture, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(UsageError, match=r"differs: 1 picture file of 2 changed, such as .*a\.png"):
        pictures(replaces=False)
    # a run that goes on keeps what it began with
    mark = TokenStore.open(tmp_path / "data" / "built_dataset" / config.name).meta.fingerprint
    assert pictures(trained_on={mark}) == [CONTENT]
    assert pictures() == [other]
    assert any("Rebuilding" in text and "1 picture file of 2 changed" in text for text in told)
    # what is gone cannot be compared, and the set has it
    picture.unlink()
    assert pictures() == [other]
    assert "its pictures are those that were read then: `data build --replace` reads them again" in told[-1]
    picture.write_bytes(OTHER)
    assert pictures(reads_again=True) == [OTHER]


def test_a_list_of_picture_files_that_somebody_wrote_reads_no_device(readers, tmp_path):
    (tmp_path / PATH).write_bytes(CONTENT)
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMS["image"]))
    config, told = DataConfig(sources=[{"path": str(tmp_path / "rows.jsonl")}], root=tmp_path / "data"), list[str]()
    folder = open_or_build(config, str(readers("qwen2_5_vl"))).folder
    for files in ({"/dev/zero": [0, 1, "0" * 32]}, {"\0": [0, 1, ""]}, {"x": 1}, [], None):
        (folder / "picture_files.json").write_text(json.dumps(files))
        assert open_or_build(config, str(readers("qwen2_5_vl")), log=told.append).pictures(0) == [CONTENT]


def test_pictures_in_memory_and_in_parquet_are_the_same_sample(build, tmp_path):
    image = Image.open(io.BytesIO(CONTENT))
    rows = [{"messages": [{"role": "user", "content": [{"type": "image", "image": image}, ASKED]}, ANSWER]}]
    (stored,) = build(data_file(rows, tmp_path / "in"), name="memory").pictures(0)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), np.asarray(image))
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({
        "messages": [[{"role": "user", "content": MARKED}, ANSWER]], "images": [[{"bytes": CONTENT, "path": PATH}]]
    })  # fmt: skip
    assert build(data_file(table, tmp_path / "in"), name="parquet").pictures(0) == [CONTENT]


def test_relative_paths_are_below_media_root(build, tmp_path, monkeypatch):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "c.png").write_bytes(OTHER)
    rows = [row({"type": "image", "path": "c.png"}, ASKED)]
    assert build(rows, media_root=tmp_path / "media").pictures(0) == [OTHER]
    with pytest.raises(DataError, match=r"\('c\.png'\): cannot be read: .*relative paths are below data.media_root"):
        build(rows)
    # those of rows in memory are below the folder of the process, as the script that made them means it
    (tmp_path / "in_memory").mkdir()
    monkeypatch.chdir(tmp_path / "media")
    for name in ("c.png", Path("c.png")):
        rows = [row({"type": "image", "path": name}, ASKED)]
        assert build(data_file(rows, tmp_path / "in_memory"), name="memory").pictures(0) == [OTHER]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="or below the folder that you start in"):
        build(data_file(rows, tmp_path / "in_memory"), name="memory", root=tmp_path / "other")
    for mode in ("CMYK", "F", "HSV"):  # a file of rows can hold the first
        rows = [row({"type": "image", "image": Image.new("RGB", (20, 20)).convert(mode)}, ASKED)]
        if mode == "CMYK":
            assert len(build(data_file(rows, tmp_path / "in_memory"), name="memory", root=tmp_path / mode).pictures(0))
            continue
        with pytest.raises(DataError, match=f"row 1: a picture has pixels of mode {mode}; convert it to RGB"):
            data_file(rows, tmp_path / "in_memory")


def bad(content: bytes) -> dict[str, Any]:
    return row({"type": "image", "base64": base64.b64encode(content).decode()}, ASKED)


@pytest.mark.parametrize("num_sizes", [8, pytest.param(2000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_for_a_picture_is_what_the_processor_writes(readers, family, num_sizes):
    """Of a blank picture, for any other pixels of its size."""

    folder = str(readers(family))
    tokenizer = load_tokenizer(folder)
    processor = PictureProcessor(folder, tokenizer)
    random = np.random.default_rng(4)
    for height, width in random.integers(5, 90, (num_sizes, 2)).tolist():
        if max(height, width) / min(height, width) > 15:
            continue
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        made = processor.processor(text=[processor.mark], images=[image], return_tensors="np")
        expected = processor.standing(height, width)
        assert list(made["input_ids"][0]) == tokenizer(expected.text)["input_ids"]
        assert np.asarray(made["pixel_values"]).size == expected.num_values
        assert list(made["input_ids"][0]).count(processor.token_id) == expected.num_tokens


@pytest.mark.parametrize(
    ("processor", "images", "says"),
    [
        ("Idefics2Processor", "Idefics2ImageProcessor", "does not say what it writes for one picture"),
        ("Llama4Processor", "Llama4ImageProcessor", "transformers cannot make this processor"),
        ("NoSuchProcessor", "Idefics2ImageProcessor", "which the installed transformers does not have"),
    ],
)
def test_processors_that_cannot_be_used_are_refused(tmp_path, processor, images, says):

    make_reader(tmp_path, "idefics3")
    written = {"processor_class": processor, "image_processor": {"image_processor_type": images}}
    (tmp_path / "processor_config.json").write_text(json.dumps(written))
    with pytest.raises(DataError, match=says):
        PictureProcessor(str(tmp_path), load_tokenizer(str(tmp_path))).standing(20, 30)


def test_a_picture_on_its_side_is_read_upright(build):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels = np.asarray(Image.open(io.BytesIO(CONTENT)))
    file = io.BytesIO()
    Image.fromarray(np.rot90(pixels).copy()).save(file, "PNG", exif=exif.tobytes())
    turned, upright = build([bad(file.getvalue())]), build([FORMS["path"]], name="upright")
    assert [turned.extra[f"picture_{side}s"].tolist() for side in ("height", "width")] == [[20], [30]]
    assert np.array_equal(turned.sample(0).token_ids, upright.sample(0).token_ids)
    from flatout.data.pictures.read import decoded

    assert np.array_equal(np.asarray(decoded(turned.pictures(0)[0])), pixels)


def test_a_row_with_pictures_is_dropped_whole_or_stays(build):
    length = len(build([FORMS["path"]]).sample(0).token_ids)
    texts = [{"messages": [{"role": "user", "content": f"q{number}"}, ANSWER]} for number in range(40)]
    rows = [FORMS["path"], *texts]
    assert build(rows, max_tokens=length).num_pictures == 1
    for policy in ("auto", "truncate", "split", "drop"):
        store = build(rows, max_tokens=length - 1, too_long=policy)
        assert (store.num_samples, store.num_pictures, store.meta.counts["too_long"]) == (40, 0, 1)
        assert "picture_bytes" not in store.columns
    with pytest.raises(DataError, match="are over max_tokens"):
        build(rows, max_tokens=length - 1, too_long="error")


def test_files_are_stored_once_and_equal_texts_ask_about_different_pictures(build):
    rows = [FORMS["path"], row({"type": "image", "path": "b.png"}, ASKED), FORMS["base64"]]
    store = build(rows)
    assert [store.pictures(index) for index in range(3)] == [[CONTENT], [OTHER], [CONTENT]]
    assert len(store.extra["picture_bytes"]) == len(CONTENT) + len(OTHER)
    same_size = draw(20, 30, 9)
    rows[1] = bad(same_size)
    assert build(rows, dedupe="exact").num_samples == 2
    assert build(rows).hashes[0] == build(rows).hashes[2] != build(rows).hashes[1]


def test_pictures_carry_no_loss(build, readers):
    pad = load_tokenizer(str(readers("qwen2_5_vl"))).convert_tokens_to_ids("<|image_pad|>")
    ids, loss_mask = build([FORMS["path"]], loss_type="all").sample(0).pair
    assert not loss_mask[ids == pad].any()
    assert loss_mask[1:][ids[1:] != pad].all()


def test_what_cannot_read_pictures_is_refused(build, small_tokenizer_dir, tmp_path):
    build([FORMS["path"]])
    sources = [{"path": str(tmp_path / "rows.jsonl")}]
    config = DataConfig(name="text", root=tmp_path / "data", sources=sources, template="chatml")
    with pytest.raises(DataError, match="has no image processor"):
        open_or_build(config, str(small_tokenizer_dir))
    pair = {"prompt": FORMS["path"]["messages"][:1], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "no"}]}
    with pytest.raises(DataError, match="answers are compared on texts only"):
        build([pair])


def test_samples_are_shown_with_their_pictures(build, tmp_path, capsys):
    from flatout.cli.main import main

    build([row(*[{"type": "image", "base64": base64.b64encode(draw(64, 64)).decode()}], ASKED), FORMS["path"]])
    assert main(["data", "show", "set", "--root", str(tmp_path / "data")]) == 0
    printed = capsys.readouterr().out
    assert "<|image_pad|>\N{MULTIPLICATION SIGN}" in printed
    assert "picture 1: 20 x 30 pixels, 8 tokens" in printed
    assert "2 pictures, at most 1 a sample" in printed
    out = tmp_path / "page.html"
    assert main(["data", "show", "set", "--root", str(tmp_path / "data"), "--html", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 2
    assert "img-src data:" in page


@pytest.mark.exhaustive
def test_the_example_learns_from_images_in_memory(tmp_path, monkeypatch):
    make_picture_model(tmp_path / "model", "qwen2_5_vl")
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[3] / "examples" / "pictures_in_memory.py"
    assert runpy.run_path(str(example))["main"]("model") == ["It is red.", "It is green.", "It is blue."]
