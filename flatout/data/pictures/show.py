"""How the pictures of a data set are shown: in a line each, in statistics, and as small copies."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from flatout.data.pictures.read import decoded, require_pillow
from flatout.data.token_store import TokenStore

# a longer run of one token stands for a picture
_LONGEST_RUN = 16


def shortened(token_ids: list[int], has_pictures: bool) -> Iterator[tuple[list[int], str]]:
    """Yield ids to decode, each with what to write behind them: of a long run of one, as of a picture, its length.

    Without pictures, all ids are yielded as they are.
    """
    plain = list[int]()
    for token_id, run in groupby(token_ids) if has_pictures else ():
        if (length := len(list(run))) < _LONGEST_RUN:
            plain += [token_id] * length
            continue
        yield plain, ""
        yield [token_id], f"\N{MULTIPLICATION SIGN}{length}"
        plain = []
    yield plain if has_pictures else token_ids, ""


def picture_lines(store: TokenStore, index: int) -> list[str]:
    """Return a line for each picture of a sample: its pixels as it is shown, and its tokens."""
    own = slice(*store.picture_offsets[index : index + 2])
    names = ("picture_heights", "picture_widths", "picture_tokens")
    rows = zip(*(store.extra[name][own].tolist() for name in names), strict=True) if store.num_pictures else ()
    return [f"picture {k}: {height:,} x {width:,} pixels, {n:,} tokens" for k, (height, width, n) in enumerate(rows, 1)]


def picture_statistics(store: TokenStore) -> Iterator[str]:
    """Yield how many pictures a store has, what they take of its tokens, and their sizes; nothing without any."""
    if not store.num_pictures:
        return
    most, tokens = int(np.diff(store.picture_offsets).max()), np.asarray(store.extra["picture_tokens"], np.int64)
    share = tokens.sum() / store.lengths.sum()
    pixels = np.asarray(store.extra["picture_heights"], np.int64) * store.extra["picture_widths"]
    yield (
        f"{store.num_pictures:,} pictures, at most {most} a sample: {share:.0%} of all tokens, {tokens.mean():,.0f} "
        f"each (at most {tokens.max():,}); {pixels.mean() / 1e6:.2g} megapixels on average"
    )


def thumbnails(pictures: Sequence[bytes], most_pixels: int = 256) -> list[str]:
    """Return small copies of pictures as data URIs, which are at most so wide and high."""
    images = []
    for content in pictures:
        image, file = decoded(content).convert("RGBA"), io.BytesIO()
        image.thumbnail((most_pixels, most_pixels))
        ground = require_pillow().Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image)
        ground.convert("RGB").save(file, format="JPEG", quality=80)
        images.append(f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")
    return images
