"""`flatout export`: writes a run for llama.cpp, Ollama, vLLM or MLX, and prints the command that uses it."""

from __future__ import annotations

import argparse
from pathlib import Path

from flatout.cli.screen import import_transformers, progress_console, rows
from flatout.view.open_runs import find_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add = parser.add_argument
    add("target", type=find_model, metavar="RUN", help="run folder; also an adapter or model folder, or a hub id")
    add("--to", required=True, metavar="PROGRAM", help="gguf (llama.cpp), ollama, vllm or mlx")
    add("--out", type=Path, required=True, help="output folder; must be empty or not exist")
    add("--best", action="store_true", help="export the run's best/ instead of final/")
    own = "f32, f16, bf16 or q8_0; others such as q4_k_m by llama.cpp's llama-quantize (the weights' dtype)"
    add("--quantize", metavar="KIND", help=own)
    add("--adapter", action="store_true", help="with --to vllm: export only the adapter, not the merged model")
    add("--base", help="base model (folder or hub id) to use instead of the adapter's own")
    llama_cpp = "llama.cpp's folder: its converter writes the GGUF, as for models that flatout does not write itself"
    add("--llama-cpp", type=Path, metavar="FOLDER", help=llama_cpp)


def run(args: argparse.Namespace) -> None:
    """Write, and print what and how to use it. Raises as `export` does."""
    import_transformers()
    from flatout.export.write import export

    results = "best" if args.best else "final"
    options = {"base": args.base, "kind": args.quantize, "adapter": args.adapter, "llama_cpp": args.llama_cpp}
    with progress_console() as console:
        console.on_phase(f"writing {args.target} for {args.to}")
        exported = export(args.target, args.to, args.out, results=results, **options)
    print(rows([("written", str(exported.path)), ("", exported.note)]))
    print(exported.command)
