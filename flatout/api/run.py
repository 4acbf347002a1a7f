"""A run as an object: its figures, curves and answers, and the way out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.api.inputs import prompts_in_memory
from flatout.config.folders import how_to_finish
from flatout.config.read import load_config
from flatout.config.schema import Config
from flatout.config.spelling import in_python, spelled_for
from flatout.errors import UsageError
from flatout.rollout.sampler import check_options
from flatout.track.run_log import RunLog, read_run
from flatout.track.summary import next_commands, summarize, summary_lines
from flatout.view.facts import headline
from flatout.view.open_runs import find_run

if TYPE_CHECKING:
    from flatout.export.write import Exported
    from flatout.rollout.sampler import Completion
    from flatout.view.rollouts import RoundAnswers

Prompts = str | Sequence[Mapping[str, Any]] | Sequence[str | Sequence[Mapping[str, Any]]]


class Run:
    """A run folder, of a finished run or of one in any other state; made by `flatout.train` and `flatout.load`.

    Raises DataError for a folder that is not a run's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._loaded: tuple[Any, Any] | None = None
        read_run(self.folder)

    @property
    def log(self) -> RunLog:
        """What the run has written so far: start, steps, evaluations, answers, events, end."""
        return read_run(self.folder)

    @property
    def config(self) -> Config:
        """The settings of the run."""
        read_run(self.folder)
        return load_config(self.folder / "config.yaml")

    @property
    def final_dir(self) -> Path:
        """The folder with the trained adapter or model. Raises UsageError if the run is not finished."""
        if not (self.folder / "final").is_dir():
            why = f"the run is not finished; {how_to_finish(self.folder)}"
            raise UsageError(f"{self.folder} has no final/: {why}")
        return self.folder / "final"

    def metrics(self, kind: str = "steps") -> Any:
        """Return the records of a kind as a pandas.DataFrame, or as a list of dicts without pandas.

        A kind is "steps", "evals", "rounds" or "held_out".
        """
        if kind not in (kinds := ("steps", "evals", "rounds", "held_out")):
            raise UsageError(f"metrics: kind is {kind!r}; expected one of {', '.join(kinds)}")
        rows = [asdict(record) for record in getattr(self.log, kind)]
        if find_spec("pandas") is None:
            return rows
        return import_module("pandas").DataFrame(rows)

    def rollouts(self, round: int) -> RoundAnswers:
        """Return the answers of a round, from 1, with their rewards. Raises UsageError for one that the run lacks."""
        from flatout.view.rollouts import read_round

        return read_round(self.folder, round)

    def plot(self) -> Page:
        """Return the run's report; a notebook shows it, `save` writes it to a file."""
        from flatout.view.page import page
        from flatout.view.report import run_fragment

        return Page(page(f"{self.folder.name} · flatout", run_fragment(self.log)))

    @spelled_for(in_python)
    def generate(
        self,
        prompts: Prompts,
        *,
        images: Any = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stream: bool = False,
    ) -> list[str]:
        """Return an answer to each prompt: text, or messages of a conversation. The model is loaded once.

        `images` is the picture of a single prompt or a list of its pictures; for several prompts, such an item (or
        None) for each. Pictures are paths, data URIs, files' bytes or Pillow's images. They stand where a prompt has
        `<image>`, else before it. Messages may have picture parts instead. `system` precedes every prompt.
        Sampled as its generation_config says, unless `temperature` (0: greedy), `top_p` or `top_k` is given. `stream`
        prints each answer as it is generated.
        """
        from flatout.rollout.chat import Sampling, answer_all

        check_options(max_new_tokens, temperature, top_p, top_k, seed)
        asked, sampling = self._asked(prompts, images, system), Sampling(temperature, top_p, top_k, seed)
        return answer_all(*asked, max_new_tokens=max_new_tokens, sampling=sampling, stream=stream)

    @spelled_for(in_python)
    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        images: Any = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[list[Completion]]:
        """Return `n` completions of each prompt, with their `token_ids`, `logprobs`, `text` and `ending`.

        Tokens are drawn from the whole `softmax(logits / temperature)`, whatever generation_config says, and `logprobs`
        are its logarithms; greedy ones (temperature 0) have the model's own. Draws depend on `seed`, the prompt's index
        and the completion's. Other arguments are those of `generate`.
        """
        from flatout.rollout.chat import Sampling, sample_all

        check_options(max_new_tokens, temperature, 1.0, 0, seed, n)
        asked, sampling = self._asked(prompts, images, system), Sampling(temperature, 1.0, 0, seed)
        return sample_all(*asked, n, max_new_tokens=max_new_tokens, sampling=sampling)

    def chat(self, prompt: str | None = None, **options: Any) -> str | None:
        """Answer one prompt, or chat at the keyboard until an empty line; `options` as for `generate`."""
        if prompt is not None:
            return self.generate([prompt], **options)[0]
        messages: list[Mapping[str, Any]] = []
        with suppress(EOFError):
            while said := input("> ").strip():
                messages.append({"role": "user", "content": said})
                messages.append({"role": "assistant", "content": self.generate([messages], stream=True, **options)[0]})
        return None

    @spelled_for(in_python)
    def merge(self, out: str | Path, *, device: str = "cpu") -> Path:
        """Merge the adapter into its base model and write a plain transformers folder; return it."""
        from flatout.models.export import merge_adapter

        if device not in ("cpu", "cuda"):
            raise UsageError(f"device is {device!r}; expected cpu or cuda")
        merge_adapter(str(self.folder), Path(out), device=device)
        return Path(out)

    @spelled_for(in_python)
    def push_to_hub(self, repo: str, *, merged: bool = False, private: bool = False, **options: Any) -> str:
        """Push the adapter, or the merged model, to a new repository with a model card; return its address.

        `options` are `base`, `results` and `replace` of `flatout.export.push.push`, which says what is raised.
        """
        from flatout.export.push import push

        return push(self.folder, repo, merged=merged, private=private, **options)

    @spelled_for(in_python)
    def export(self, to: str, out: str | Path, **options: Any) -> Exported:
        """Write the run for "gguf" (llama.cpp), "ollama", "vllm" or "mlx"; return the path and the command to use it.

        `options` are `kind` (a GGUF's quantization), `adapter`, `base`, `results` and `llama_cpp` of
        `flatout.export.write.export`, which says what is raised.
        """
        from flatout.export.write import export

        return export(str(self.folder), to, Path(out), **options)

    def __repr__(self) -> str:
        log = self.log
        lines = summary_lines(summarize(log), next_commands(log)) if log.steps else ["no step yet"]
        return "\n".join([f"Run({str(self.folder)!r})", *lines])

    def _repr_html_(self) -> str:
        log = self.log
        rows = headline(summarize(log)) if log.steps else []
        cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        steps = "\n".join(line for line in summary_lines(summarize(log), next_commands(log)) if "flatout" in line)
        shown = f"<b>{escape(str(self.folder))}</b> {escape(log.state)}"
        return f"<div>{shown}</div><table>{cells}</table>{f'<pre>{escape(steps)}</pre>' if steps else ''}"

    def _asked(self, prompts: Prompts, images: Any, system: str | None) -> tuple[Any, Any, list[Sequence[int]]]:
        """Return the model, its tokenizer, and the token ids of prompts."""
        from flatout.rollout.chat import prompt_ids

        shown = prompts_in_memory(prompts, images, system)
        model, tokenizer = self._model()
        return model, tokenizer, [prompt_ids(model, tokenizer, one.messages, one.pictures) for one in shown]

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            read_run(self.folder)
            import torch

            from flatout.models.load.inference import load_trained, resolve_model_paths

            device = torch.device("cuda" if torch.cuda.is_available() and self.config.device != "cpu" else "cpu")
            self._loaded = load_trained(resolve_model_paths(str(self.folder)), device=device)
        return self._loaded


@spelled_for(in_python)
def load(run: str | Path) -> Run:
    """Return a run by its folder, or its name in `runs/`, whatever its state.

    Raises UsageError if there is none, DataError for a folder that is not a run's.
    """
    return Run(find_run(run))


class Page:
    """An HTML page that a notebook shows in a frame."""

    def __init__(self, html: str) -> None:
        self.html = html

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, or over an earlier page; return its path. Raises UsageError for another file."""
        from flatout.io.own_output import write_output

        with spelled_for(in_python):
            write_output(Path(path), self.html.encode(), "html")
        return Path(path)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" width="100%" height="720" style="border:0"></iframe>'
