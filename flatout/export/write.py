"""Write a run for a program that serves it: llama.cpp, Ollama, vLLM or MLX."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flatout.checkpoint.manifest import MANIFEST_NAME, verify_final
from flatout.errors import Fix, ResourceError, UsageError, install, reason_of
from flatout.export.gguf_file import FILE_TYPES, stop_fields, stops_left_out, why_not, write_gguf
from flatout.export.ollama import modelfile
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.models.export import load_merged, publish_model, require_empty, save_model
from flatout.models.load.auto_class import is_scoring
from flatout.models.load.inference import FINAL_DIR, ModelPaths, resolve_model_paths
from flatout.models.lora.adapter_file import ADAPTER_CONFIG
from flatout.models.stops import GENERATION_CONFIG, stop_token_ids

TARGETS = ("gguf", "ollama", "vllm", "mlx")
# the values that vLLM's --max-lora-rank takes
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Exported:
    """What an export wrote, the command that uses it, and what was done, in words."""

    path: Path
    command: str
    note: str


def export(
    target: str,
    to: str,
    out: Path,
    *,
    base: str | None = None,
    results: str = FINAL_DIR,
    kind: str | None = None,
    adapter: bool = False,
    llama_cpp: Path | None = None,
) -> Exported:
    """Write a run, adapter or model for `to`, one of TARGETS, into the empty folder `out`.

    `kind` is a GGUF's encoding (None: the weights' own dtype). `adapter` writes the adapter alone (vllm). `llama_cpp`
    is where llama.cpp's tools are, besides PATH. Raises UsageError for what a format cannot hold, CheckpointError for
    damaged results, ResourceError.
    """
    is_gguf, kind = to in ("gguf", "ollama"), kind and kind.lower()
    _check(to, is_gguf=is_gguf, kind=kind, adapter=adapter, llama_cpp=llama_cpp)
    quantizer = None if kind is None or kind in FILE_TYPES else _find_tool("llama-quantize", llama_cpp)
    if quantizer is None and kind is not None and kind not in FILE_TYPES:
        raise UsageError(
            f"quantization {kind} needs llama.cpp's llama-quantize in PATH or llama_cpp; {', '.join(FILE_TYPES)} none",
            [Fix({"--quantize": "q8_0"}, "8 bits")],
        )
    require_empty(out)
    trained, name = resolve_model_paths(target, base=base, results=results), Path(target).resolve().name
    if ((folder := trained.adapter or Path(trained.base)) / MANIFEST_NAME).is_file():
        verify_final(folder)
    if adapter:
        return _write_adapter(trained, out, name)
    DurableIO().make_dir(out)
    model, tokenizer, num_merged = load_merged(trained)
    scores = is_scoring(model.config)
    if scores and to != "vllm":
        raise UsageError(
            f"{target} scores texts, and {to} has no place for the scores of a {type(model).__name__}",
            [Fix({"--to": "vllm"}, "transformers' folder, as flatout merge writes it")],
        )
    note, place = f"{num_merged} layers merged" if num_merged else "no adapter to merge", shlex.quote(str(out))
    if is_gguf:
        converter = _find_tool("convert_hf_to_gguf.py", llama_cpp) if llama_cpp or why_not(model) else None
        written = _write_gguf(model, tokenizer, out, name, kind, (converter, quantizer), for_ollama=to == "ollama")
        return replace(written, note=f"{note}; {written.note}")
    _write_folder(model, tokenizer, out)
    if to == "vllm":
        runner = " --runner pooling" if scores else ""
        return Exported(out, f"vllm serve {place} --served-model-name {shlex.quote(name)}{runner}", note)
    note += f"; mlx-lm reads this folder as it is; mlx_lm.convert --hf-path {place} -q quantizes it"
    return Exported(out, f"mlx_lm.chat --model {place}", note)


def _check(to: str, *, is_gguf: bool, kind: str | None, adapter: bool, llama_cpp: Path | None) -> None:
    if to not in TARGETS:
        raise UsageError(f"to is {to!r}; expected one of {', '.join(TARGETS)}")
    if adapter and to != "vllm":
        raise UsageError(f"adapter: {to} takes merged weights; leave it out", [Fix({"--to": "vllm"})])
    if (kind or llama_cpp) and not is_gguf:
        raise UsageError(f"a quantization and llama_cpp have no effect on {to}; leave them out")
    if kind and not kind.isidentifier():
        raise UsageError(f"{kind!r} is no quantization; expected one of q8_0, q4_k_m, f16, or another of llama.cpp")
    if llama_cpp and not llama_cpp.is_dir():
        raise UsageError(f"llama_cpp: there is no folder {llama_cpp}; name the folder of llama.cpp")
    if is_gguf and find_spec("gguf") is None:
        raise UsageError(f"to={to} needs the gguf package: {install('gguf')}")


def _find_tool(name: str, folder: Path | None) -> Path | None:
    """Return a tool of llama.cpp from its folder, else from PATH; None without it."""
    places = [folder / name, folder / "build" / "bin" / name] if folder else []
    on_path = shutil.which(name)
    return next((place for place in places if place.is_file()), Path(on_path) if on_path else None)


def _run_tool(command: list[str]) -> None:
    """Run a tool of llama.cpp, whose lines go to stderr."""
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if code != 0:
        raise ResourceError(f"llama.cpp failed with exit code {code}; its lines above say why: {shlex.join(command)}")


def _add_stops(file: Path, fields: dict[str, int], stop_ids: Sequence[int]) -> None:
    """Name the tokens that end an answer in a converter's file; one that has names for the first of them stays."""
    import gguf

    try:
        gguf_fields = gguf.GGUFReader(file).fields
    except (OSError, ValueError, IndexError) as error:
        raise ResourceError(
            f"llama.cpp's converter wrote no GGUF file: {reason_of(error)}; update llama.cpp"
        ) from error
    keys = {field: f"tokenizer.ggml.{field}_token_id" for field in ("eos", "eot", "eom")}
    stop_ids_of = {field: int(gguf_fields[key].contents()) for field, key in keys.items() if key in gguf_fields}
    if set(stop_ids[:3]) <= set(stop_ids_of.values()):
        return
    changed, copied = [(name, str(token_id)) for name, token_id in fields.items()], file.with_suffix(".stops")
    options = [word for pair in changed for word in ("--special-token-by-id", *pair)]
    _run_tool([sys.executable, "-P", "-m", "gguf.scripts.gguf_new_metadata", *options, str(file), str(copied)])
    copied.replace(file)


def _write_folder(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """Write a Hugging Face folder that older readers understand: mlx-lm 0.32 does not know rope_parameters."""
    publish_model(model, tokenizer, out)
    config = read_json(out / "config.json")
    scaling = dict(config.get("rope_parameters") or {})
    if (theta := scaling.pop("rope_theta", None)) is not None:
        older = {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling["rope_type"] != "default" else {})
        DurableIO().write_json(out / "config.json", config | older)


def _write_adapter(trained: ModelPaths, out: Path, name: str) -> Exported:
    """Copy an adapter. Raises UsageError for one that vLLM refuses."""
    if trained.adapter is None:
        raise UsageError(f"adapter: {trained.base} has no adapter; leave it out to write the whole model")
    config, durable_io = read_json(trained.adapter / ADAPTER_CONFIG), DurableIO()
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    allowed = next((rank_limit for rank_limit in _VLLM_RANKS if rank_limit >= rank), None)
    odd = [name for name in ("use_dora", "modules_to_save", "trainable_token_indices") if config.get(name)]
    if odd or allowed is None:
        obstacle = {"use_dora": "DoRA"}.get(odd[0], odd[0]) if odd else f"rank {rank}"
        raise UsageError(f"adapter: vLLM does not take adapters with {obstacle}; leave it out to merge the adapter")
    with durable_io.replace_dir(out) as new, durable_io.resource_errors("write", out):
        shutil.copytree(trained.adapter, new, dirs_exist_ok=True)
    base = shlex.quote(trained.base) + (f" --revision {shlex.quote(trained.revision)}" if trained.revision else "")
    words = f"--enable-lora --lora-modules {shlex.quote(f'{name}={out}')} --max-lora-rank {allowed}"
    # what the base model's files do not say: the template, and the tokens that end an answer
    for option, file in (("--tokenizer", "tokenizer_config.json"), ("--generation-config", GENERATION_CONFIG)):
        words += f" {option} {shlex.quote(str(out))}" if (out / file).is_file() else ""
    return Exported(out, f"vllm serve {base} {words}", f"the adapter alone, rank {rank}")


def _write_gguf(
    model: PreTrainedModel,
    tokenizer: Any,
    out: Path,
    name: str,
    kind: str | None,
    tools: tuple[Path | None, Path | None],
    *,
    for_ollama: bool,
) -> Exported:
    """Write a GGUF file by the gguf package or llama.cpp's converter, and for Ollama a Modelfile.

    `tools` are that converter and llama.cpp's quantizer, where they are needed.
    """
    converter, quantizer = tools
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(str(model.dtype).removeprefix("torch."), "f32")
    durable_io, plain_kind = DurableIO(), dtype if quantizer else kind or dtype
    path, stop_ids = out / f"{name}-{kind or dtype}.gguf", stop_token_ids(model, tokenizer, ())
    with durable_io.replace_dir(out) as new, durable_io.resource_errors("write", out):
        durable_io.require_free(out.parent, sum(tensor.nbytes for tensor in model.state_dict().values()))
        file, plain, merged = new / path.name, new / "plain.gguf", new / "merged"
        first = plain if quantizer else file
        if converter is not None:
            save_model(model, tokenizer, merged)
            words = [sys.executable, converter, merged, "--outfile", first, "--outtype", plain_kind]
            _run_tool([str(word) for word in words])
            _add_stops(first, stop_fields(tokenizer, stop_ids), stop_ids)
        else:
            write_gguf(model, tokenizer, first, name=name, kind=plain_kind, stop_ids=stop_ids)
        if quantizer is not None:
            _run_tool([str(quantizer), str(plain), str(file), (kind or dtype).upper()])
        command, note = f"llama-cli -m {shlex.quote(str(path))}", f"written by {converter or 'the gguf package'}"
        if left_out := ", ".join(map(repr, stops_left_out(tokenizer, stop_ids))):
            how = "the Modelfile names them" if for_ollama else "send them as stop strings"
            note += f"; warning: a GGUF file holds three tokens that end an answer, and not {left_out}: {how}"
        if for_ollama:
            text, about = modelfile(path.name, model, tokenizer, stop_ids)
            durable_io.write_bytes(new / "Modelfile", text.encode())
            command = f"ollama create {shlex.quote(name)} -f {shlex.quote(str(out / 'Modelfile'))}"
            note += f"; {about}"
        for leftover in (plain, merged):
            durable_io.remove_tree(leftover)
    return Exported(path, command, note)
