"""llama.cpp's own tools, where they are installed: its converter, and its quantizer."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from flatout.errors import ResourceError, UsageError

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"


def find_tool(name: str, folder: Path | None) -> Path | None:
    """Return a tool of llama.cpp from its folder (--llama-cpp), else from PATH; None without it."""
    places = [] if folder is None else [folder / name, folder / "build" / "bin" / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None and folder is not None and not folder.is_dir():
        raise UsageError(f"--llama-cpp: there is no folder {folder}; name the folder of llama.cpp")
    on_path = shutil.which(name)
    return found or (Path(on_path) if on_path else None)


def convert(model_folder: Path, file: Path, *, kind: str, converter: Path) -> None:
    """Convert a Hugging Face folder by llama.cpp's converter, in this Python. Raises ResourceError if it fails."""
    _call([sys.executable, str(converter), str(model_folder), "--outfile", str(file), "--outtype", kind], file)


def quantize(source: Path, file: Path, *, kind: str, folder: Path | None) -> None:
    """Quantize a GGUF file by llama-quantize, such as to q4_k_m.

    Raises UsageError if it is not installed, ResourceError if it fails.
    """
    if (tool := find_tool(QUANTIZER, folder)) is None:
        raise UsageError(
            f"--quantize {kind} needs llama.cpp's {QUANTIZER}, which is neither in PATH nor below --llama-cpp; install "
            "llama.cpp, or use f32, f16, bf16 or q8_0"
        )
    _call([str(tool), str(source), str(file), kind.upper()], file)


def _call(command: list[str], file: Path) -> None:
    """Run a program that writes `file`; what it prints goes to stderr."""
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False).returncode
    if code != 0 or not file.is_file():
        raise ResourceError(f"llama.cpp failed with exit code {code}; its lines above say why: {shlex.join(command)}")
