"""The pages of studio and what their scripts ask for. Each request calls what the command line calls."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from jinja2 import Environment, PackageLoader
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from flatout.api.data import data_sets
from flatout.api.runs import read_run, read_side_files, write_notes
from flatout.api.settings import DEVICES, OBJECTIVES, Config, describe_setting, setting_names, words_of
from flatout.errors import FlatoutError, ResourceError, SecurityError, UsageError, reason_of
from flatout.io.redact import printable, redacted
from flatout.studio.guard import Guard
from flatout.studio.jobs import Worker, WorkerJob
from flatout.studio.trainings import Trainings
from flatout.studio.workspace import MAX_UPLOAD_BYTES, Workspace
from flatout.view.facts import row_figures
from flatout.view.open_runs import open_runs
from flatout.view.page import page
from flatout.view.report import run_fragment, runs_fragment

MAX_BODY_BYTES = 1 << 20
SAMPLES_PER_PAGE = 5
LINES = "application/x-ndjson"
# settings of the form that a button sets, by its name; those that fit a card are tried in their order
PRESETS = {
    "LoRA": {"method": "lora", "base.storage": "model"},
    "QLoRA": {"method": "lora", "base.storage": "nf4"},
    "Full": {"method": "full"},
}
DATA_SETTINGS = (
    "data.name", "model.name", "data.max_tokens", "data.loss_type", "data.template", "data.on_bad_row", "data.dedupe",
)  # fmt: skip
# groups of a form: title, settings
RUN_SETTINGS = (
    ("Model", ("model.name", "method", "base.storage", "lora.rank", "lora.alpha", "model.precision")),
    ("Steps", ("batch.samples_per_step", "batch.epochs", "batch.max_steps", "optim.lr", "schedule.kind")),
    ("Loss", ("objective.kind", "optim.max_grad_norm")),
    ("Evaluation and saving", ("eval.fraction", "eval.every_steps", "checkpoint.every_steps")),
    ("Machine", ("gpus", "device", "memory", "recompute")),
)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Settings(_Body):
    settings: dict[str, str]
    overrides: list[str] = []


class _Build(_Settings):
    source: str
    format: str = "auto"
    columns: dict[str, str] = {}
    replaces: bool = False


class _Plan(_Settings):
    device: str = ""
    tokens_per_s: Annotated[float, Field(ge=0.001)] | None = None


class _Folder(_Body):
    folder: str


class _Delete(_Folder):
    # what the person was shown; without it, nothing is deleted
    others: list[str] | None = None


class _Notes(_Folder):
    note: str
    tags: str


class _Samples(_Body):
    name: str
    first: int = Field(default=0, ge=0)
    count: int = Field(default=SAMPLES_PER_PAGE, ge=1, le=100)


class _Columns(_Body):
    source: str


class _Rename(_Folder):
    name: str


class _Out(_Folder):
    to: Literal["merged", "gguf", "gguf-q8_0", "ollama", "ollama-q8_0", "vllm", "mlx"]


class _Push(_Folder):
    repo: str = Field(min_length=1)
    merged: bool = False
    private: bool = True


class _Turn(_Body):
    prompt: str
    run: str
    base: str = ""


class _Chat(_Body):
    run: str
    turns: list[_Turn]
    prompt: str = Field(min_length=1)
    system: str = ""
    max_new_tokens: int = Field(ge=1, le=8192)
    temperature: Literal[0] | Annotated[float, Field(ge=0.01, le=5)] | None = None


JOBS: dict[str, type[_Body]] = {
    "build": _Build, "columns": _Columns, "samples": _Samples, "plan": _Plan, "chat": _Chat, "out": _Out, "push": _Push,
}  # fmt: skip
# jobs that another job's worker does
_WORKERS = {"columns": "plan", "samples": "plan", "out": "chat", "push": "chat"}
# the pages, and the step of the road that each belongs to
PAGES = {"data": "data", "plan": "plan", "runs": "runs", "run": "runs", "compare": "runs", "chat": "chat"}
BodyType = TypeVar("BodyType", bound=_Body)


def make_app(root: Path, token: str, port: int, log: Callable[[str], None], models: Sequence[Path] = ()) -> Guard:
    """Return studio for the workspace `root`; `log` gets one sentence about the runs that go on when it ends.

    `models` are folders outside it whose models may be read.
    """
    studio = Studio(Workspace(root, models))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for worker in studio.workers.values():
            await worker.close()
        for folder, pid in studio.trainings.running().items():
            log(f"{folder} goes on as pid {pid}; stop it with `kill {pid}`, watch it with `flatout watch {folder}`")

    files: list[str | tuple[str, str]] = [("flatout.view", "assets"), ("flatout.studio", "assets")]
    routes: list[BaseRoute] = [
        Route("/", studio.entry),
        Mount("/static", StaticFiles(packages=files)),
        Route("/api/run", studio.live),
        Route("/api/build", studio.follow_build),
        Route("/api/settings", studio.settings),
        Route("/api/figures", studio.figures),
        Route("/report", studio.report),
        Route("/api/upload", studio.upload, methods=["POST"]),
        Route("/api/cancel", studio.cancel, methods=["POST"]),
        *(Route(f"/api/{kind}", studio.run_job, methods=["POST"]) for kind in JOBS),
        *(Route(f"/api/{action}", studio.act, methods=["POST"]) for action in ACTIONS),
        *(Route(f"/{name}", studio.page) for name in PAGES),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((FlatoutError, ClientDisconnect, OSError), studio.refuse)
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), token, port)


class Studio:
    """The handlers of all requests, and what they share: the workspace, its runs, and its worker processes."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.trainings = workspace, Trainings(workspace)
        self.workers = {name: Worker(workspace) for name in ("build", "plan", "chat")}
        self._figures: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._templates = Environment(loader=PackageLoader("flatout.studio", "assets"), autoescape=True)

    async def entry(self, request: Request) -> Response:
        """Exchange the token of the address for a cookie, and go on to the first page."""
        # not a redirect: after one from another page, the browser would hold back the SameSite=Strict cookie
        response = HTMLResponse(self._templates.get_template("entry.html").render())
        name, token = request.scope["studio_cookie"]
        response.set_cookie(name, token, httponly=True, samesite="strict", path="/")
        return response

    def page(self, request: Request) -> Response:
        """Return one of PAGES. Raises UsageError, and SecurityError for a run outside the workspace."""
        name, query, workspace = request.url.path[1:], request.query_params, self.workspace
        facts: dict[str, Any] = {"current": PAGES[name], "workspace": workspace.root}
        if name in ("data", "plan"):
            sets = data_sets(workspace.data_root)
            shown = query.get("name") or (sets[-1].name if sets else "")
            facts |= run_settings() | {"sets": sets, "shown": shown, "per_page": SAMPLES_PER_PAGE, "devices": DEVICES}
            facts |= {"free_name": workspace.free_run_name(), "max_upload_bytes": MAX_UPLOAD_BYTES, "presets": PRESETS}
            facts["objectives"] = list(OBJECTIVES)
        if name in ("data", "plan", "runs", "chat"):
            facts["survey"] = workspace.survey()
        if name in ("runs", "chat"):
            facts |= {"runs": self.trainings.rows(facts["survey"].runs), "chosen": query.get("run", "")}
        elif name == "run":
            folder = workspace.run(query.get("folder", ""))
            facts |= {"folder": workspace.relative(folder), "notes": read_side_files(folder).notes}
        elif name == "compare":
            folders = [workspace.run(folder) for folder in query.getlist("run")]
            if len(folders) < 2:
                raise UsageError("choose at least two runs to compare")
            logs = zip(map(workspace.relative, folders), open_runs(folders).values(), strict=True)
            facts["fragment"] = runs_fragment(dict(logs))
        return HTMLResponse(self._templates.get_template(f"{name}.html").render(facts))

    async def upload(self, request: Request) -> Response:
        """Write the body of the request to a file of the workspace; return its path."""
        name = request.query_params.get("name", "")
        return JSONResponse({"path": await self.workspace.receive(name, request.stream())})

    async def run_job(self, request: Request) -> Response:
        """Have a worker do one of JOBS and answer with its lines. The request is checked before a process starts."""
        kind = request.url.path.rpartition("/")[2]
        body = await _read(request, JOBS[kind])
        facts = body.model_dump()
        try:
            config = await run_in_threadpool(self._checked, body, facts)
        except UsageError as error:
            if kind != "plan":
                raise
            # a setting that is being typed is no failed request
            return Response(json.dumps({"error": words_of(error)}) + "\n", media_type=LINES)
        if config and isinstance(body, _Plan) and body.tokens_per_s is None and not body.device:
            speed = await run_in_threadpool(self.trainings.measured_speed, config)
            facts |= {"tokens_per_s": speed[0], "measured_in": speed[1]} if speed else {}
        if kind == "chat":
            system = facts.pop("system")
            facts["turns"] = [*([{"system": system}] if system else []), *facts["turns"]]
            facts["gpus_in_use"] = await run_in_threadpool(self.trainings.gpus_in_use)
        # a long build keeps neither plans nor samples waiting
        return _stream(self.workers[_WORKERS.get(kind, kind)].submit(kind, **facts))

    def _checked(self, body: _Body, facts: Mapping[str, Any]) -> Config | None:
        """Return the configuration of a request, if it has one. Raises what is wrong with its paths and settings."""
        workspace = self.workspace
        look = {"source": workspace.contained, "run": workspace.run_or_model, "folder": workspace.run}
        for name in look.keys() & facts.keys():
            look[name](facts[name])
        return workspace.config(body.settings, body.overrides) if isinstance(body, _Settings) else None

    def settings(self, request: Request) -> Response:
        """The settings of a run that differ from their defaults, as text by dotted name: where another one starts."""
        return JSONResponse(self.trainings.settings(self.workspace.run(request.query_params.get("folder", ""))))

    def figures(self, request: Request) -> Response:
        """What the list of runs shows of one: loss or reward, steps, time."""
        folder = self.workspace.run(request.query_params.get("folder", ""))
        stamp = (folder / "metrics.jsonl").stat().st_mtime_ns
        if self._figures.get(folder, (0, {}))[0] != stamp:  # a long run takes seconds to read
            self._figures[folder] = (stamp, row_figures(read_run(folder)))
        return JSONResponse(self._figures[folder][1])

    def report(self, request: Request) -> Response:
        """The page of a run, as `flatout report` writes it, to save."""
        folder = self.workspace.run(request.query_params.get("folder", ""))
        content = page(f"{folder.name} · flatout", run_fragment(read_run(folder)))
        name = re.sub(r"[^\w.-]+", "-", folder.name, flags=re.ASCII)
        return HTMLResponse(content, headers={"content-disposition": f'attachment; filename="{name}.html"'})

    async def follow_build(self, request: Request) -> Response:
        """The build that runs, for a page that is opened meanwhile; an empty answer if there is none."""
        job = self.workers["build"].current
        return _stream(job) if job is not None else Response()

    async def cancel(self, request: Request) -> Response:
        """End the build that runs; what it has written is removed by the next one."""
        await self.workers["build"].close()
        return JSONResponse({})

    async def act(self, request: Request) -> Response:
        """Do one of ACTIONS; answer with what it returns."""
        action = request.url.path.rpartition("/")[2]
        kind, do = ACTIONS[action]
        answer = await run_in_threadpool(do, self, await _read(request, kind))
        if action in ("train", "resume") or "trash" in answer:
            # before the run measures the memory that is free; a build goes on
            for name, worker in self.workers.items():
                if name != "build" or worker.current is None:
                    await worker.close()
        return JSONResponse(answer)

    def notes(self, body: _Notes) -> dict[str, Any]:
        """Write a run's note and tags, which a space or a comma parts; return them."""
        folder, tags = self.workspace.run(body.folder), re.findall(r"[^\s,]+", body.tags)
        gone = set(read_side_files(folder).notes.tags) - set(tags)
        notes = write_notes(folder, note=body.note, add=tags, remove=sorted(gone))
        return {"note": notes.note, "tags": list(notes.tags)}

    def live(self, request: Request) -> Response:
        """Return the state of a run, and its drawing if the page has an older one."""
        query = request.query_params
        return JSONResponse(self.trainings.live(self.workspace.run(query.get("folder", "")), query.get("version", "")))

    async def refuse(self, request: Request, error: FlatoutError | ClientDisconnect | OSError) -> Response:
        """Answer with the error's sentence: as JSON to a script, as a page to a person."""
        if isinstance(error, ClientDisconnect):
            error = UsageError("the request was cut off; send it again")
        elif isinstance(error, OSError):
            error = ResourceError(f"cannot use {error.filename or 'a file'}: {reason_of(error)}; check its permissions")
        status = 403 if isinstance(error, SecurityError) else 409 if isinstance(error, ResourceError) else 400
        text = printable(redacted(words_of(error)))
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": text}, status)
        facts = {"text": text, "current": "", "workspace": self.workspace.root}
        return HTMLResponse(self._templates.get_template("error.html").render(facts), status)


# what a page asks for at once: the body of the request, and what does it
ACTIONS: dict[str, tuple[type[_Body], Callable[[Studio, Any], dict[str, Any]]]] = {
    "train": (_Settings, lambda own, body: {"folder": own.trainings.start(own.workspace.config(**body.model_dump()))}),
    "stop": (_Folder, lambda own, body: {"folder": own.trainings.stop(own.workspace.run(body.folder))}),
    "resume": (_Folder, lambda own, body: {"folder": own.trainings.resume(own.workspace.run(body.folder))}),
    "rename": (
        _Rename,
        lambda own, body: {"folder": own.trainings.rename_run(own.workspace.run(body.folder), body.name)},
    ),
    "delete": (_Delete, lambda own, body: own.trainings.delete(own.workspace.run(body.folder), body.others)),
    "notes": (_Notes, Studio.notes),
}


@cache
def run_settings() -> dict[str, Any]:
    """Return what the forms of data and of runs show, from the schema."""
    return {
        "fields": [describe_setting(name) for name in DATA_SETTINGS],
        "formats": replace(describe_setting("data.sources.format"), name="format"),
        "groups": [(title, [describe_setting(name) for name in names]) for title, names in RUN_SETTINGS],
        "names": list(setting_names()),
    }


async def _read(request: Request, kind: type[BodyType]) -> BodyType:
    """Read and check a JSON body. Raises UsageError."""
    content = b""
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise UsageError(f"the request is larger than {MAX_BODY_BYTES:,} bytes")
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "request"
        raise UsageError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def _stream(job: WorkerJob) -> Response:
    """Answer with the lines of a job as they come, one JSON object a line."""
    return StreamingResponse((json.dumps(line) + "\n" async for line in job.follow()), media_type=LINES)
