"""Write a run for a program that serves it: llama.cpp, Ollama, vLLM or MLX."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel

from flatout.checkpoint.final import MANIFEST_NAME, verify_final
from flatout.errors import UsageError
from flatout.export.gguf_file import FILE_TYPES, why_not, write_gguf
from flatout.export.llama_cpp import CONVERTER, convert, find_tool, quantize
from flatout.export.ollama import modelfile
from flatout.io.durable_io import DurableIO
from flatout.io.json_file import read_json
from flatout.models.export import publish_model, save_model
from flatout.models.generate import end_of_turn_id, stop_token_ids
from flatout.models.load.inference import FINAL_DIR, ModelPaths, resolve_model_paths
from flatout.models.merge import load_merged, require_empty

TARGETS = ("gguf", "ollama", "vllm", "mlx")
# the values that vLLM's --max-lora-rank takes
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Exported:
    """What an export wrote, the command that uses it, and what was done, in words."""

    path: Path
    command: str
    note: str


def resolve_results(target: str, *, base: str | None, results: str) -> ModelPaths:
    """Resolve as `resolve_model_paths`, and check the manifest of results that a run wrote. Raises CheckpointError."""
    trained = resolve_model_paths(target, base=base, results=results)
    folder = trained.adapter or Path(trained.base)
    if (folder / MANIFEST_NAME).is_file():
        verify_final(folder)
    return trained


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
    is where llama.cpp's tools are, besides PATH. Raises UsageError for what a format cannot hold, ResourceError.
    """
    if to not in TARGETS:
        raise UsageError(f"--to is {to!r}; expected one of {', '.join(TARGETS)}")
    is_gguf = to in ("gguf", "ollama")
    if adapter and to != "vllm":
        raise UsageError(f"--adapter: {to} takes merged weights; leave it out, or use --to vllm")
    if (kind or llama_cpp) and not is_gguf:
        raise UsageError(f"--quantize and --llama-cpp have no effect on --to {to}; leave them out")
    if is_gguf and find_spec("gguf") is None:
        raise UsageError(f"--to {to} needs the gguf package: pip install 'flatout[gguf]'")
    require_empty(out)
    trained = resolve_results(target, base=base, results=results)
    name = Path(target).resolve().name
    if adapter:
        return _adapter_for_vllm(trained, out, name)
    DurableIO().make_dir(out)
    model, tokenizer, num_merged = load_merged(trained)
    done = f"{num_merged} layers merged" if num_merged else "no adapter to merge"
    place = shlex.quote(str(out))
    if to == "vllm":
        publish_model(model, tokenizer, out)
        return Exported(out, f"vllm serve {place} --served-model-name {shlex.quote(name)}", done)
    if to == "mlx":
        publish_model(model, tokenizer, out)
        note = f"{done}; mlx-lm reads this folder as it is; `mlx_lm.convert --hf-path {place} -q` quantizes it"
        return Exported(out, f"mlx_lm.chat --model {place}", note)
    return _gguf(model, tokenizer, out, name, kind, llama_cpp, done, for_ollama=to == "ollama")


def _adapter_for_vllm(trained: ModelPaths, out: Path, name: str) -> Exported:
    """Copy an adapter. Raises UsageError for one that vLLM refuses."""
    if trained.adapter is None:
        raise UsageError(f"--adapter: {trained.base} has no adapter; leave it out to write the whole model")
    config = read_json(trained.adapter / "adapter_config.json")
    if config.get("use_dora"):
        raise UsageError("--adapter: vLLM does not take DoRA adapters; leave it out to merge the adapter")
    if (rank := int(config["r"])) > _VLLM_RANKS[-1]:
        raise UsageError(f"--adapter: vLLM takes ranks up to {_VLLM_RANKS[-1]}, but this one has {rank}; leave it out")
    durable_io, empty = DurableIO(), out.with_name(f".{out.name}.old")
    with durable_io.replace_dir(out, aside=empty) as new, durable_io.resource_errors("write", out):
        shutil.copytree(trained.adapter, new, dirs_exist_ok=True)
        durable_io.sync_tree(new)
    durable_io.remove_tree(empty)
    allowed = next(one for one in _VLLM_RANKS if one >= rank)
    base = shlex.quote(trained.base) + (f" --revision {shlex.quote(trained.revision)}" if trained.revision else "")
    modules = f"--lora-modules {shlex.quote(f'{name}={out}')} --max-lora-rank {allowed}"
    return Exported(out, f"vllm serve {base} --enable-lora {modules}", f"the adapter alone, rank {rank}")


def _gguf(
    model: PreTrainedModel,
    tokenizer: object,
    out: Path,
    name: str,
    kind: str | None,
    llama_cpp: Path | None,
    done: str,
    *,
    for_ollama: bool,
) -> Exported:
    """Write a GGUF file, and for Ollama its Modelfile: by the gguf package, by llama.cpp's converter where it must."""
    own = {"bfloat16": "bf16", "float16": "f16"}.get(str(model.dtype).removeprefix("torch."), "f32")
    kind = (kind or own).lower()
    plain_kind = kind if kind in FILE_TYPES else own
    stop_ids = stop_token_ids(model, tokenizer) if getattr(tokenizer, "chat_template", None) else []
    reason = why_not(model)
    converter = find_tool(CONVERTER, llama_cpp) if reason or llama_cpp else None
    durable_io, empty = DurableIO(), out.with_name(f".{out.name}.old")
    file_name = f"{name}-{kind}.gguf"
    with durable_io.replace_dir(out, aside=empty) as new, durable_io.resource_errors("write", out):
        durable_io.require_free(out.parent, 2 * sum(one.nbytes for one in model.state_dict().values()))
        file = new / file_name if plain_kind == kind else new / "plain.gguf"
        if converter is not None:
            save_model(model, tokenizer, new / "merged")
            convert(new / "merged", file, kind=plain_kind, converter=converter)
            durable_io.remove_tree(new / "merged")
        else:
            turn_end = end_of_turn_id(tokenizer) if stop_ids else None
            write_gguf(model, tokenizer, file, name=name, kind=plain_kind, turn_end=turn_end)
        if plain_kind != kind:
            quantize(file, new / file_name, kind=kind, folder=llama_cpp)
            durable_io.remove_tree(file)
        command, by = f"llama-cli -m {shlex.quote(str(out / file_name))}", converter or "the gguf package"
        note = f"{done}; written by {by}"
        if for_ollama:
            text, about = modelfile(file_name, model, tokenizer, stop_ids)
            durable_io.write_bytes(new / "Modelfile", text.encode())
            command, note = f"ollama create {shlex.quote(name)} -f {shlex.quote(str(out / 'Modelfile'))}", f"{note}; {about}"
        durable_io.sync_tree(new)
    durable_io.remove_tree(empty)
    return Exported(out / file_name if not for_ollama else out / "Modelfile", command, note)
